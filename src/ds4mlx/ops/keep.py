"""What a step keeps of its tokens: latent queries, rows of windows, and what compressors hold and complete."""
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ds4mlx.ops import keep_cuda
from ds4mlx.ops.compress import compress_token
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kv_round import Packing
from ds4mlx.ops.latent import latent_step


@dataclass(frozen=True, slots=True)
class Group:
    """What a compressor takes in: arrays as those of `compress_token`."""
    k: mx.array
    s: mx.array
    frontiers: mx.array
    ape: mx.array
    norm: mx.array
    cos: mx.array
    sin: mx.array
    packing: Packing | None


def keep_step(q: mx.array, kv: mx.array, q_norm: mx.array, kv_norm: mx.array, cos: mx.array, sin: mx.array,
              windows: mx.array, positions: mx.array, packed: bool, eps: float,
              groups: Sequence[Group]) -> tuple[mx.array, mx.array, list[tuple[mx.array, mx.array]]]:
    """`latent_step` of the tokens, and `compress_token` for each group; on CUDA in one launch, for it is little work.

    Arrays are those of these two. Returns qr and the windows, and of each group its frontiers and rows.
    Raises ValueError when the shapes do not fit.
    """
    fits = keep_cuda.latent_fits(kv.shape[1], 2 * cos.shape[1]) and all(
        keep_cuda.group_fits(group.norm.shape[0], 2 * group.cos.shape[1], group.packing) for group in groups)
    return pick(apart, cuda=cuda if fits else None)(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps,
                                                    groups)


def apart(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps, groups):
    qr, windows = latent_step(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps)
    return qr, windows, [compress_token(g.k, g.s, g.frontiers, g.ape, g.norm, g.cos, g.sin, positions, g.ape.shape[0],
                                        g.packing, eps) for g in groups]


def cuda(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps, groups):
    parts = [keep_cuda.latent_part(q, kv, q_norm, kv_norm, cos, sin, windows),
             *(keep_cuda.group_part(i, g.k, g.s, g.frontiers, g.ape, g.norm, g.cos, g.sin, g.packing)
               for i, g in enumerate(groups))]
    row = keep_cuda.sizes(q.shape[1], kv.shape[1], 2 * cos.shape[1], windows.shape[2], windows.dtype)
    qr, after, *rest = keep_cuda.launch(positions, parts, row, eps)
    return qr, after, list(zip(rest[::2], rest[1::2], strict=True))
