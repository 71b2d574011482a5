"""Hyper-connections: the residual path is four streams, mixed into one before each half layer and back after it.

What a half layer gives is not mixed back at once: the next one does both in one pass over the streams.
"""
from typing import NamedTuple

import mlx.core as mx

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Linear


class Update(NamedTuple):
    """A half layer's output y [T, D], and how it is mixed back: post [T, 4], m [T, 4, 4] (`ops.hyper_mix`)."""
    y: mx.array
    post: mx.array
    m: mx.array

    def rows(self, chosen: slice) -> "Update":
        """Of some of the tokens."""
        return Update(*(a[chosen] for a in self))


def enter(streams: mx.array, update: Update | None, fn: Linear, scale: mx.array, base: mx.array, norm: mx.array,
          config: Config) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Streams [T, 4, D] and the update they still lack, to a half layer's input x [T, D], normalised; the streams
    with the update; and post and m of this half layer's own update."""
    c = config
    return ops.hyper_input(streams, fn.weight, update, scale, base, norm, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


def leave(streams: mx.array, update: Update | None, fn: Linear, scale: mx.array, base: mx.array, norm: mx.array,
          config: Config) -> mx.array:
    """Streams and the update they still lack to the output matrix's input [T, D], normalised: no Sinkhorn here."""
    return ops.hyper_output(streams, fn.weight, update, scale, base, norm, config.hc_eps, config.rms_norm_eps)
