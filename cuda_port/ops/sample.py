"""The next token of each row of logits."""
import ctypes
from collections.abc import Sequence

import numpy as np

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import Defines, kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import clusters, launch

CLUSTER = 8     # blocks that look through a row
THREADS = 1024
MOST_ROWS = 16      # of a step, as sample.cu has it


class _Kept(ctypes.Structure):
    """`struct Kept` of sample.cu."""
    _fields_ = [("rows", ctypes.c_void_p * MOST_ROWS)]


def sample(logits: "cp.ndarray", plain: "cp.ndarray", settings: "cp.ndarray", top_k: "cp.ndarray", token: "cp.ndarray",
           report: "cp.ndarray", following: "cp.ndarray | None" = None) -> None:
    """token i32 [B]: of logits f32 [B, V], each row by its own settings f32 [B, 4], a uniform number, temperature,
    min_p and top_p, and top_k i32 [B]; temperature 0: the argmax. As `ds4mlx.ops.sample` defines it.

    plain f32 [B, V]: the logits as the model gave them. report f32 [B, 2]: the token's log-probability in those, and
    its adjusted logit. following i32 [B] gets the token too.
    """
    B, V = logits.shape
    defines = _defines(V)
    launch(kernel("sample", "sample", defines), (dict(defines)["CLUSTER"], B), (THREADS,),
           (logits, plain, settings, top_k, token, report, following, scratch.take("sample.keys", (B, V), np.uint32),
            scratch.take("sample.ids", (B, V), np.int32)))


def keep(logits: "cp.ndarray", rows: "Sequence[cp.ndarray]") -> None:
    """rows[b] = logits[b], f32 [V], of up to 16 rows, wherever they lie."""
    B, V = logits.shape
    kept = _Kept(rows=(ctypes.c_void_p * MOST_ROWS)(*(row.data.ptr for row in rows)))
    launch(kernel("sample", "keep", _defines(V)), (-(-V // THREADS), B), (THREADS,), (logits, kept))


def _defines(V: int) -> Defines:
    return ("V", V), ("CLUSTER", CLUSTER if clusters() else 1)
