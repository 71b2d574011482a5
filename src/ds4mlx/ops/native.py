"""Matrix products for the CPU: weights decoded a slab at a time, multiplied by NumPy's BLAS.

MLX's Linux wheel brings an unoptimised BLAS: a 175 x 4096 by 4096 x 2048 product takes 1.26 s against NumPy's 0.018 s
on two cores. These functions leave MLX's graph: they evaluate their inputs.
"""
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import numpy as np

from ds4mlx.gguf.dequant import dequantize

SLAB_WEIGHTS = 1 << 21  # decoded at once on a core: 8 MiB of float32, near the cache and small beside any model


def array(x: mx.array) -> np.ndarray:
    """x as float32 in host memory, without a copy where it is that already."""
    x = x.astype(mx.float32)
    mx.eval(x)
    return np.array(x, copy=False)


def matmul(x: np.ndarray, blocks: np.ndarray, kind: str) -> np.ndarray:
    """y = x W^T.  x [T, K] f32; blocks [N, row bytes] u8 of the GGUF type `kind`. Returns [T, N] f32."""
    rows = max(1, SLAB_WEIGHTS // x.shape[-1])
    starts = range(0, blocks.shape[0], rows)
    if len(starts) == 1:
        return x @ dequantize(blocks, kind).T
    y = np.empty((x.shape[0], blocks.shape[0]), np.float32)

    def slab(start: int) -> None:
        np.matmul(x, dequantize(blocks[start:start + rows], kind).T, out=y[:, start:start + rows])

    list(_threads().map(slab, starts))  # a list: so that what a slab raises is raised here
    return y


@cache
def _threads() -> ThreadPoolExecutor:
    """NumPy lets go of the interpreter while it decodes, so slabs decode on all cores."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ds4mlx-native")
