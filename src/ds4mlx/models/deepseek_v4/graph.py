"""READ THIS FIRST. DeepSeek V4 in the paper's order: embed -> layers -> head.

A token is four residual streams. Each half layer (attention, experts) reads a mix of the four and is mixed back into
them; there is no other residual path. Attributes are named as in the published checkpoint.
"""
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import hyper
from ds4mlx.models.deepseek_v4.attention import Attention
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.experts import MoE
from ds4mlx.models.deepseek_v4.hyper import Update
from ds4mlx.models.deepseek_v4.layers import Chunk, Linear
from ds4mlx.models.deepseek_v4.state import LayerState, Rounding


class Layer(nn.Module):
    """Attention, then experts, each between its own hyper-connection's mix and its inverse."""

    def __init__(self, config: Config, index: int, rounding: Rounding) -> None:
        super().__init__()
        self.hc_attn_fn, self.hc_ffn_fn = Linear(), Linear()
        self.hc_attn_scale: mx.array | None = None
        self.hc_attn_base: mx.array | None = None
        self.hc_ffn_scale: mx.array | None = None
        self.hc_ffn_base: mx.array | None = None
        self.attn_norm: mx.array | None = None
        self.ffn_norm: mx.array | None = None
        self.attn = Attention(config, config.compress_ratios[index], rounding)
        self.ffn = MoE(config, hashed=index < config.num_hash_layers)
        self.config = config

    def __call__(self, streams: mx.array, update: Update | None, chunk: Chunk,
                 state: LayerState) -> tuple[mx.array, Update]:
        """Streams [T, 4, D] f32 and the update they still lack to the same; `state` takes in the chunk."""
        c = self.config
        x, streams, *back = hyper.enter(streams, update, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base,
                                        self.attn_norm, c)
        update = Update(self.attn(x, chunk, state), *back)
        x, streams, *back = hyper.enter(streams, update, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base,
                                        self.ffn_norm, c)
        state.offset = chunk.end
        return streams, Update(self.ffn(x, chunk), *back)


class Model(nn.Module):
    """The whole model. One sequence at a time: compression groups are aligned to position 0, so nothing can be padded.

    Follows mlx-lm's convention: `model(tokens, cache=model.make_cache())`, so that its generation loop runs on it.
    """

    def __init__(self, config: Config, kv_round: Rounding = "official") -> None:
        super().__init__()
        self.config, self.rounding = config, kv_round
        self.embed: ops.Blocks | None = None         # [V, row bytes]
        self.layers = [Layer(config, i, kv_round) for i in range(config.num_hidden_layers)]
        self.norm: mx.array | None = None
        self.head = Linear()
        self.hc_head_fn = Linear()
        self.hc_head_scale: mx.array | None = None
        self.hc_head_base: mx.array | None = None

    def __call__(self, tokens: mx.array, cache: list[LayerState] | None = None) -> mx.array:
        """tokens int [1, T] after what `cache` covers (nothing if None). Returns logits f32 [1, T, V]."""
        if tokens.shape[0] != 1:
            raise ValueError(f"DeepSeek V4 takes one sequence at a time, got a batch of {tokens.shape[0]}")
        return self.logits(*self.streams(tokens[0], cache or self.make_cache()))[None]

    def streams(self, ids: mx.array, cache: list[LayerState]) -> tuple[mx.array, Update]:
        """ids [T] through all layers: the final streams [T, 4, D] and their last update. The cache takes in the
        chunk."""
        chunk = Chunk(self.config, ids, cache[0].offset)
        x = ops.dequantize(self.embed.take(np.array(ids)), self.embed.kind)
        streams = mx.repeat(x[:, None], self.config.hc_mult, axis=1)
        update = None
        for layer, state in zip(self.layers, cache, strict=True):
            streams, update = layer(streams, update, chunk, state)
        return streams, update

    def logits(self, streams: mx.array, update: Update) -> mx.array:
        """What `streams` gave, or rows of it, to logits f32 [T, V]. Ask only for rows that are needed: V is large."""
        x = hyper.leave(streams, update, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.norm, self.config)
        return self.head(x)

    def make_cache(self, context: int | None = None) -> list[LayerState]:
        """A fresh state: one per layer, covering no token, with no more room than `context` tokens need if given."""
        return [LayerState(self.config, i, self.rounding, context) for i in range(self.config.num_hidden_layers)]
