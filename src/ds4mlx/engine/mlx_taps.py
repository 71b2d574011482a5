"""Watching the MLX model: while one chunk goes through it, stand-ins take down what its parts read and give.

Nothing of this is in the graph, so that who does not watch pays nothing.
"""
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine.taps import LayerTaps, Taps
from ds4mlx.models.deepseek_v4.attention import Attention
from ds4mlx.models.deepseek_v4.graph import Layer, Model
from ds4mlx.models.deepseek_v4.hyper import Update
from ds4mlx.models.deepseek_v4.layers import Chunk
from ds4mlx.models.deepseek_v4.state import LayerState

QUERIES = 16    # whose attention is computed at once: their chosen rows are copied for each


class _WatchedLayer:
    """Stands where a layer stood, computes the same and keeps it."""

    def __init__(self, layer: Layer, watched: bool) -> None:
        self.layer, self.watched = layer, watched
        self.out: tuple[mx.array, Update] | None = None
        self.taps: LayerTaps | None = None
        self._seen: dict[str, mx.array | np.ndarray | None] = {}

    def __call__(self, streams: mx.array, update: Update | None, tokens: Chunk,
                 state: LayerState) -> tuple[mx.array, Update]:
        if not self.watched:
            self.out = self.layer(streams, update, tokens, state)
            return self.out
        attn, ffn = self.layer.attn, self.layer.ffn
        attend, route = attn.attend, ffn.route
        attn.attend = lambda *inputs: self._attended(attn, attend(*inputs), *inputs)
        ffn.route = lambda *inputs: self._routed(*route(*inputs))
        try:
            streams, attended = self.layer.attention_half(streams, update, tokens, state)
            self.out = streams, fed = self.layer.experts_half(streams, attended, tokens)
        finally:
            del attn.attend, ffn.route      # of the instances: the methods are there again
        after = ops.hyper_mix(streams, self.layer.hc_ffn_fn.weight, fed)[0]
        found = {"streams": after, "attn": attended.y, "attn_post": attended.post, "attn_mix": attended.m,
                 "ffn": fed.y, "ffn_post": fed.post, "ffn_mix": fed.m, **self._seen}
        self.taps = LayerTaps(**{name: None if a is None else np.array(a) for name, a in found.items()})
        return self.out

    def _routed(self, experts: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        self._seen |= {"experts": experts, "weights": weights}
        return experts, weights

    def _attended(self, attn: Attention, out: mx.array, q: mx.array, window: mx.array, chosen: mx.array | None,
                  tokens: Chunk, state: LayerState) -> mx.array:
        masses = attention_masses(attn, q, window, chosen, tokens, state)
        self._seen |= {"window_mass": masses[..., 0], "compressed_mass": masses[..., 1], "rows": None}
        if attn.ratio == 4:
            visible = (np.arange(tokens.start, tokens.end) + 1) // attn.ratio
            rows = np.arange(tokens.most(4), dtype=np.int32)[None] if chosen is None else np.array(chosen)
            self._seen["rows"] = np.where(rows < visible[:, None], rows, np.int32(-1))
        return out


def attention_masses(attn: Attention, q: mx.array, window: mx.array, chosen: mx.array | None, tokens: Chunk,
                     state: LayerState) -> np.ndarray:
    """f32 [T, H, 2]: shares of the window's and of the compressed rows in each head's attention (`ops.attention`)."""
    c, (cos, sin) = attn.config, tokens.tables(attn.ratio > 0)
    D, tail = c.head_dim, c.qk_rope_head_dim
    q = ops.rope_tail(mx.fast.rms_norm(q.reshape(tokens.size, -1, D), None, c.rms_norm_eps), cos, sin) * D ** -0.5
    count = tokens.most(attn.ratio) if attn.ratio else 0
    rows = _unpacked(state.compressed.rows.view(0, count), D, tail) if count else None
    near = _Keys(_unpacked(window, D, tail), np.arange(tokens.end - window.shape[0], tokens.end))
    parts = [_block_masses(q[t:t + QUERIES], np.arange(tokens.start + t, tokens.end)[:QUERIES], near, rows,
                           None if chosen is None else chosen[t:t + QUERIES], attn)
             for t in range(0, tokens.size, QUERIES)]
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Raw rows [R, D] and the positions that they are of."""
    rows: mx.array
    positions: np.ndarray


def _block_masses(q: mx.array, at: np.ndarray, near: _Keys, rows: mx.array | None, chosen: mx.array | None,
                  attn: Attention) -> np.ndarray:
    age = at[:, None] - near.positions
    z = [_logits(q, near.rows, (age >= 0) & (age < attn.config.sliding_window))]
    if rows is not None:
        which = np.arange(rows.shape[0])[None] if chosen is None else np.array(chosen)
        seen = np.broadcast_to(which < (at[:, None] + 1) // attn.ratio, (len(at), which.shape[1]))
        z.append(_logits(q, rows if chosen is None else rows[mx.where(mx.array(seen), chosen, 0)], seen))
    z.append(mx.broadcast_to(attn.attn_sink.reshape(1, -1, 1), (*q.shape[:2], 1)))
    p = np.array(mx.softmax(mx.concatenate(z, axis=-1), axis=-1, precise=True))
    R = near.rows.shape[0]
    return np.stack([p[..., :R].sum(-1), p[..., R:-1].sum(-1)], axis=-1)


def _logits(q: mx.array, keys: mx.array, visible: np.ndarray) -> mx.array:
    """q [T, H, D] on keys [R, D], or each query's own [T, R, D], to [T, H, R]."""
    return mx.where(mx.array(visible)[:, None], q @ keys.swapaxes(-1, -2), -mx.inf)


def _unpacked(rows: mx.array, D: int, tail: int) -> mx.array:
    return ops.fp8_unpack(rows, D, tail) if rows.dtype == mx.uint8 else rows


@dataclass(slots=True)
class Watch:
    """A chunk that was watched, once it has gone through."""
    layers: list[_WatchedLayer] = field(default_factory=list)

    def taps(self, model: Model, tokens: list[int], start: int) -> Taps:
        logits = np.array(model.logits(*self.layers[-1].out))
        return Taps(start, np.array(tokens, np.int32), logits,
                    {i: layer.taps for i, layer in enumerate(self.layers) if layer.taps is not None})


@contextmanager
def watching(model: Model, layers: Collection[int]) -> Iterator[Watch]:
    """Inside, the model is watched while it takes one chunk in."""
    real, watch = model.layers, Watch([_WatchedLayer(layer, i in layers) for i, layer in enumerate(model.layers)])
    model.layers = watch.layers
    try:
        yield watch
    finally:
        model.layers = real
