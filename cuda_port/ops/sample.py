"""The next token of each row of logits."""
import numpy as np

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import clusters, launch

CLUSTER = 8     # blocks that look through a row


def sample(logits: "cp.ndarray", plain: "cp.ndarray", settings: "cp.ndarray", top_k: "cp.ndarray", token: "cp.ndarray",
           report: "cp.ndarray", following: "cp.ndarray | None" = None) -> None:
    """token i32 [B]: of logits f32 [B, V], each row by its own settings f32 [B, 4], a uniform number, temperature,
    min_p and top_p, and top_k i32 [B]; temperature 0: the argmax. As `ds4mlx.ops.sample` defines it.

    plain f32 [B, V]: the logits as the model gave them. report f32 [B, 2]: the token's log-probability in those, and
    its adjusted logit. following i32 [B] gets the token too.
    """
    B, V = logits.shape
    cluster = CLUSTER if clusters() else 1
    launch(kernel("sample", "sample", (("V", V), ("CLUSTER", cluster))), (cluster, B), (1024,),
           (logits, plain, settings, top_k, token, report, following, scratch.take("sample.keys", (B, V), np.uint32),
            scratch.take("sample.ids", (B, V), np.int32)))
