"""Attention: a window of the last tokens' rows, compressed rows behind it, and a sink; one row is key and value."""
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.indexer import Indexer
from ds4mlx.models.deepseek_v4.layers import Chunk, Linear, rms
from ds4mlx.models.deepseek_v4.state import LayerState, Rounding

QUERY_BLOCK = 128  # queries attended at once: their window spans 255 rows, and 64 heads of scores stay near 25 MB


class Attention(nn.Module):
    """Low-rank queries, one KV row a token, grouped low-rank output. Attributes are named as in the checkpoint."""

    def __init__(self, config: Config, ratio: int, rounding: Rounding) -> None:
        super().__init__()
        self.wq_a, self.wq_b, self.wkv, self.wo_a, self.wo_b = Linear(), Linear(), Linear(), Linear(), Linear()
        self.q_norm: mx.array | None = None
        self.kv_norm: mx.array | None = None
        self.attn_sink: mx.array | None = None
        self.config, self.ratio, self.rounding = config, ratio, rounding
        if ratio:
            self.compressor = Compressor(config, ratio, config.head_dim, rounding.attention)
        if ratio == 4:
            self.indexer = Indexer(config, rounding)

    def __call__(self, x: mx.array, chunk: Chunk, state: LayerState) -> mx.array:
        """x [T, D], normalised, to [T, D]; `state` takes in the chunk."""
        c = self.config
        cos, sin = chunk.tables(compressed=self.ratio > 0)
        qr = rms(self.wq_a(x), c.rms_norm_eps, self.q_norm)
        q = self.wq_b(qr).reshape(chunk.size, c.num_attention_heads, c.head_dim)
        q = ops.rope_tail(rms(q, c.rms_norm_eps), cos, sin)
        kv = rms(self.wkv(x), c.rms_norm_eps, self.kv_norm)
        kv = self.rounding.attention(ops.rope_tail(kv, cos, sin))
        window = mx.concatenate([state.window, kv])              # positions chunk.start - len(state.window) …
        if self.ratio:
            self.compressor(x, chunk, state.compressed)
        if self.ratio == 4:
            self.indexer.compressor(x, chunk, state.index)
        o = self._attend(q, qr, x, chunk, window, state)
        state.window = mx.contiguous(window[-c.sliding_window:])
        o = ops.rope_tail(o, cos, sin, inverse=True)
        low = self.wo_a(o.reshape(chunk.size, c.o_groups, -1), groups=c.o_groups)
        return self.wo_b(low.reshape(chunk.size, -1))

    def _attend(self, q: mx.array, qr: mx.array, x: mx.array, chunk: Chunk, window: mx.array,
                state: LayerState) -> mx.array:
        """o [T, H, D] before the inverse rotation, in blocks of queries."""
        choose = self.ratio == 4 and chunk.end // 4 > self.config.index_topk
        index = self.indexer.queries(qr, x, chunk) if choose else None
        parts = []
        for b in range(0, chunk.size, QUERY_BLOCK):
            t = np.arange(chunk.start + b, min(chunk.start + b + QUERY_BLOCK, chunk.end))
            block = slice(b, b + len(t))
            rows, rows_mask = self._visible_rows(t, block, index, state)
            parts.append(ops.attend(q[block], *self._window(t, window, chunk), rows, rows_mask, self.attn_sink))
            if chunk.size > QUERY_BLOCK:
                mx.eval(parts[-1])  # or the keys and scores of several blocks would be alive at once
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _window(self, t: np.ndarray, window: mx.array, chunk: Chunk) -> tuple[mx.array, mx.array]:
        """Raw rows p with t - W < p <= t: the rows any of the queries sees, and who sees which."""
        base = chunk.end - window.shape[0]                       # position of window[0]
        first = max(int(t[0]) - self.config.sliding_window + 1, base)
        p = np.arange(first, int(t[-1]) + 1)
        age = t[:, None] - p
        return window[first - base:int(t[-1]) + 1 - base], mx.array((age >= 0) & (age < self.config.sliding_window))

    def _visible_rows(self, t: np.ndarray, block: slice, index: tuple[mx.array, mx.array] | None,
                      state: LayerState) -> tuple[mx.array | None, mx.array | None]:
        """Compressed rows c < (t + 1) // ratio, or the chosen ones of them: [C, D] or [T, k, D], and the mask."""
        visible = (t + 1) // self.ratio if self.ratio else np.zeros_like(t)
        count = int(visible[-1])
        if not count:
            return None, None
        rows = state.compressed.rows.view(count)
        if index is None or count <= self.config.index_topk:
            return rows, mx.array(np.arange(count) < visible[:, None])
        q, weight = index
        chosen = self.indexer.select(q[block], weight[block], state.index.rows.view(count), visible)
        return rows[chosen], chosen < mx.array(visible)[:, None]
