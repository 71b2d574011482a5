"""Rotary position on the last channels of a vector, in neighbouring pairs, from tables."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick


def rope_tail(x: mx.array, cos: mx.array, sin: mx.array, inverse: bool = False) -> mx.array:
    """Pairs (a, b) of the last 2P channels become (a cos - b sin, a sin + b cos); `inverse` turns them back.

    x [T, ..., D]; cos, sin [T, P] f32, one row a token. Returns x's shape and dtype; the first D - 2P channels stay.
    Raises ValueError when D < 2P or the tokens differ.
    """
    if x.shape[0] != cos.shape[0] or x.shape[-1] < 2 * cos.shape[-1]:
        raise ValueError(f"rope_tail: x {x.shape} with tables {cos.shape}")
    return pick(reference)(x, cos, -sin if inverse else sin)


def reference(x, cos, sin):
    shape = (x.shape[0], *(1 for _ in x.shape[1:-1]), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    plain, tail = mx.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    a, b = tail[..., 0::2], tail[..., 1::2]
    turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(tail.shape)
    return mx.concatenate([plain, turned.astype(x.dtype)], axis=-1)
