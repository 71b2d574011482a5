"""READ THIS FIRST. DeepSeek V4 in the paper's order: embed -> layers -> head.

A token is four residual streams. Each half layer (attention, experts) reads a mix of the four and is mixed back into
them; there is no other residual path. Attributes are named as in the published checkpoint.
"""
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import hyper
from ds4mlx.models.deepseek_v4.attention import Attention
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.directions import Steering
from ds4mlx.models.deepseek_v4.experts import MoE
from ds4mlx.models.deepseek_v4.hyper import Update
from ds4mlx.models.deepseek_v4.layers import Batch, Chunk, Linear
from ds4mlx.models.deepseek_v4.pages import PageTable
from ds4mlx.models.deepseek_v4.stacked import StackedLayer
from ds4mlx.models.deepseek_v4.state import LayerState, Pools, Rounding
from ds4mlx.models.deepseek_v4.steering import Direction, steered


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
        self.attn_direction: Direction | None = None    # to steer along; None, as a rule
        self.ffn_direction: Direction | None = None
        self.config = config

    def __call__(self, streams: mx.array, update: Update | None, tokens: Chunk | Batch,
                 state: LayerState | StackedLayer) -> tuple[mx.array, Update]:
        """Streams [T, 4, D] f32 and the update they still lack to the same; `state` takes in the tokens."""
        streams, update = self.attention_half(streams, update, tokens, state)
        return self.experts_half(streams, update, tokens)

    def attention_half(self, streams: mx.array, update: Update | None, tokens: Chunk | Batch,
                       state: LayerState | StackedLayer) -> tuple[mx.array, Update]:
        x, streams, *back = hyper.enter(streams, update, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base,
                                        self.attn_norm, self.config)
        return streams, Update(steered(self.attn(x, tokens, state), self.attn_direction), *back)

    def experts_half(self, streams: mx.array, update: Update, tokens: Chunk | Batch) -> tuple[mx.array, Update]:
        x, streams, *back = hyper.enter(streams, update, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base,
                                        self.ffn_norm, self.config)
        return streams, Update(steered(self.ffn(x, tokens), self.ffn_direction), *back)


class Model(nn.Module):
    """The whole model. A chunk is of one sequence: compression groups are aligned to position 0, so nothing can be
    padded. A step takes one token of each of many.

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
        return self.logits(*self.chunk(tokens[0], cache or self.make_cache()))[None]

    def chunk(self, ids: mx.array, cache: list[LayerState], early: bool = False) -> tuple[mx.array, Update]:
        """ids [T] through all layers: the final streams [T, 4, D] and their last update. The cache takes in the
        chunk. early: a layer's work is begun while the host prepares the next."""
        chunk = Chunk(self.config, ids, cache[0].offset)
        out = self._streams(chunk, cache, early)
        for state in cache:
            state.offset = chunk.end
        return out

    def step(self, batch: Batch, layers: Sequence[StackedLayer]) -> mx.array:
        """One token of each sequence through all layers, which take it in. Returns logits f32 [B, V]. Rows go to the
        pools; those of positions that nobody covers are never read."""
        return self.logits(*self._streams(batch, layers))

    def _streams(self, tokens: Chunk | Batch, states: Sequence[LayerState] | Sequence[StackedLayer],
                 early: bool = False) -> tuple[mx.array, Update]:
        x = ops.dequantize(self.embed.take(tokens.ids), self.embed.kind)
        streams = mx.repeat(x[:, None], self.config.hc_mult, axis=1)
        update = None
        for layer, state in zip(self.layers, states, strict=True):
            streams, update = layer(streams, update, tokens, state)
            if early:
                mx.async_eval(streams, update, state.state)
        return streams, update

    def logits(self, streams: mx.array, update: Update | None) -> mx.array:
        """What the layers gave, or rows of it, to logits f32 [T, V]. Ask only for rows that are needed: V is large."""
        x = hyper.leave(streams, update, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.norm, self.config)
        return self.head(x)

    def steer(self, steering: Steering | None) -> None:
        """From here on; None for as it was trained."""
        for i, layer in enumerate(self.layers):
            layer.attn_direction = Direction.of(steering.vectors[i], steering.attn) if steering else None
            layer.ffn_direction = Direction.of(steering.vectors[i], steering.ffn) if steering else None

    def make_cache(self, context: int | None = None, pools: Pools | None = None) -> list[LayerState]:
        """A fresh state, covering no token: one per layer. Rows go to `pools`, or to some of its own; with a `context`,
        to no more pages than that many tokens need."""
        pools = pools or Pools(self.config, self.rounding)
        table = PageTable(pools.pages, context)
        return [LayerState(self.config, i, self.rounding, layer, table) for i, layer in enumerate(pools.layers)]
