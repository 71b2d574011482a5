"""Hyper-connections: the residual path is four streams, mixed into one before each half layer and back after it."""
import mlx.core as mx

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Linear, rms


def enter(streams: mx.array, fn: Linear, scale: mx.array, base: mx.array,
          config: Config) -> tuple[mx.array, mx.array, mx.array]:
    """Streams [T, 4, D] to the half layer's input x [T, D], and (post [T, 4], M [T, 4, 4]) for `ops.hyper_post`.

    One mean over all 4 D numbers, without weight; all in float32.
    """
    mix = fn(rms(streams.reshape(streams.shape[0], -1), config.rms_norm_eps))
    return ops.hyper_pre(streams, mix, scale, base, config.hc_sinkhorn_iters, config.hc_eps)


def collapse(streams: mx.array, fn: Linear, scale: mx.array, base: mx.array, config: Config) -> mx.array:
    """Streams [T, 4, D] to the output matrix's input [T, D]: no Sinkhorn here."""
    mix = fn(rms(streams.reshape(streams.shape[0], -1), config.rms_norm_eps))
    return ops.hyper_head(streams, mix, scale, base, config.hc_eps)
