"""y = x W^T over matrices kept in their GGUF blocks: one, or several that share their input."""
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ds4mlx.ops import native
from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.weights import Blocks

SLAB_WEIGHTS = 1 << 25  # 128 MiB of float32: bounds what the output matrix (530 M weights) needs at once


def dense_matmul(x: mx.array, w: Blocks, groups: int = 1) -> mx.array:
    """y[..., n] = sum_k x[..., k] W[n, k], in float32.

    x [..., K] float; w of [N, row bytes]. With `groups` G > 1, x is [..., G, K] and W's rows are G consecutive
    blocks of N / G, block g applied to x[..., g, :]. Returns [..., N] f32, or [..., G, N / G].
    Raises ValueError when the shapes do not go together.
    """
    n = w.shape[0]
    if groups > 1 and (n % groups or x.shape[-2] != groups):
        raise ValueError(f"dense_matmul: {n} rows in {groups} groups over x {x.shape}")
    product = pick(reference, native=cpu)
    if groups == 1:
        return product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], n)
    size = n // groups
    parts = [product(x[..., g, :].reshape(-1, x.shape[-1]), Blocks(w.raw[g * size:(g + 1) * size], w.kind))
             for g in range(groups)]
    return mx.stack(parts, axis=-2).reshape(*x.shape[:-1], size)


def dense_matmuls(x: mx.array, ws: Sequence[Blocks]) -> list[mx.array]:
    """[x W^T for each W], in float32; in decode one launch.

    x [T, K] float; ws of [N_i, row bytes], of any kinds. Returns [T, N_i] f32 each.
    """
    return pick(reference_each)(x, ws)


def reference_each(x: mx.array, ws: Sequence[Blocks]) -> list[mx.array]:
    return [dense_matmul(x, w) for w in ws]


def reference(x: mx.array, w: Blocks) -> mx.array:
    x = x.astype(mx.float32)
    rows = max(1, SLAB_WEIGHTS // x.shape[-1])
    if w.shape[0] <= rows:
        return x @ dequantize(mx.array(w.raw), w.kind).T
    parts = []
    for start in range(0, w.shape[0], rows):
        parts.append(x @ dequantize(mx.array(w.raw[start:start + rows]), w.kind).T)
        mx.eval(parts[-1])  # or all decoded slabs would be alive at once
    return mx.concatenate(parts, axis=-1)


def cpu(x: mx.array, w: Blocks) -> mx.array:
    return mx.array(native.matmul(native.array(x), np.array(w.raw, copy=False), w.kind))
