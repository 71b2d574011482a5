"""Matrices of GGUF blocks on the card: into the order that kernels read fastest, and into plain numbers."""
import ctypes
from dataclasses import replace

import numpy as np

from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch, processors
from ds4mlx.cuda_port.scratch import take
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import BLOCK_TYPES

SLAB_BYTES = 1 << 28
LANES = 32
PIECE_WEIGHTS = {"IQ2_XXS": 64, "Q2_K": 64, "Q4_K": 32, "MXFP4": 32}  # of an expert's row, for one lane (pieces.cuh)
TEAM = 8  # groups of lanes that share rows of experts


def arranged(w: Weight) -> Weight:
    """The same weights with every row's codes before its scales (blocks.cuh), rewritten in place; `w` is then void.

    Returns `w` as it is where there is no kernel for its type and shape: those read rows in the order of the file.
    """
    if w.arranged or not _can_be(w):
        return w
    row_bytes = w.raw.shape[-1]
    rows = w.raw.reshape(-1, row_bytes)
    function = kernel("dequantize", "arrange", _macros(w, "float"))
    slab = max(1, SLAB_BYTES // row_bytes)
    for start in range(0, len(rows), slab):
        part = rows[start:start + slab]
        old = take("arranged", part.shape, np.uint8)
        old[...] = part
        launch(function, (8 * processors(),), (512,), [old, part, ctypes.c_size_t(part.size)])
    return replace(w, arranged=True)


def dequantize(w: Weight, start: int, out: "cp.ndarray") -> None:
    """out = rows [start, start + len(out)) of a matrix, f16 or f32 [n, width]. Halves saturate."""
    assert len(w.shape) == 2 and (not w.arranged or w.kind == "Q8_0")
    real = "__half" if out.dtype == np.float16 else "float"
    octets = len(out) * -(-w.shape[1] // 8)
    launch(kernel("dequantize", "dequantize", _macros(w, real)), (min(-(-octets // 256), 32 * processors()),), (256,),
           [w.raw[start:start + len(out)], out, ctypes.c_size_t(octets)])


def to_half(x: "cp.ndarray", out: "cp.ndarray") -> None:
    """out f16 = x f32, saturating."""
    macros = (("KIND", 0), ("WIDTH", 8), ("OUT", "__half"), ("ARRANGED", 0))
    launch(kernel("dequantize", "to_half", macros), (min(-(-x.size // 256), 32 * processors()),), (256,),
           [x, out, ctypes.c_size_t(x.size)])


def _macros(w: Weight, real: str) -> tuple[tuple[str, int | str], ...]:
    return (("KIND", BLOCK_TYPES[w.kind].type_id), ("WIDTH", w.shape[-1]), ("OUT", real), ("ARRANGED", int(w.arranged)))


def _can_be(w: Weight) -> bool:
    rows, width = w.shape[-2:]
    if len(w.shape) == 2:
        return w.kind == "Q8_0" and width % 256 == 0 and rows % 16 == 0
    if w.kind not in PIECE_WEIGHTS:
        return False
    pieces = width // PIECE_WEIGHTS[w.kind]
    segments = pieces // LANES
    return width % 256 == 0 and pieces % LANES == 0 and 0 < segments <= TEAM and TEAM % segments == 0 and rows % 16 == 0
