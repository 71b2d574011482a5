"""Which compressed rows a token may look at, on layers of ratio 4."""
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Chunk, Linear
from ds4mlx.models.deepseek_v4.state import Rounding

SCORE_FLOATS = 1 << 24  # of [tokens, heads, rows] at once: 64 MiB, whatever the context


class Indexer(nn.Module):
    """Scores compressed rows with small vectors of its own; the best index_topk of the visible rows are attended."""

    def __init__(self, config: Config, rounding: Rounding) -> None:
        super().__init__()
        self.wq_b, self.weights_proj = Linear(), Linear()
        self.compressor = Compressor(config, 4, config.index_head_dim, rounding.indexer)
        self.heads, self.width, self.k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.rounding = rounding

    def queries(self, qr: mx.array, x: mx.array, chunk: Chunk) -> tuple[mx.array, mx.array]:
        """q [T, heads, width], rotated and rounded as the rows are, and the weight of each head [T, heads]."""
        cos, sin = chunk.tables(compressed=True)
        q = ops.rope_tail(self.wq_b(qr).reshape(-1, self.heads, self.width), cos, sin)
        return self.rounding.indexer(q), self.weights_proj(x) * (self.width * self.heads) ** -0.5

    def select(self, q: mx.array, weight: mx.array, rows: mx.array, visible: np.ndarray) -> mx.array:
        """The k rows of each query, ascending, [T, k] i32; where fewer are visible, hidden ones fill the rest.

        q, weight as from `queries`; rows [C, width], C > k; visible [T]: query t sees rows below visible[t].
        """
        tokens = max(1, SCORE_FLOATS // (self.heads * rows.shape[0]))
        parts = []
        for t in range(0, q.shape[0], tokens):
            parts.append(self._select(q[t:t + tokens], weight[t:t + tokens], rows, visible[t:t + tokens]))
            if tokens < q.shape[0]:
                mx.eval(parts[-1])  # or the scores of several parts would be alive at once
        return mx.concatenate(parts)

    def _select(self, q: mx.array, weight: mx.array, rows: mx.array, visible: np.ndarray) -> mx.array:
        scores = ops.index_scores(q, weight, rows)
        seen = mx.arange(rows.shape[0]) < mx.array(visible)[:, None]
        return ops.top_k(mx.where(seen, scores, -mx.inf), self.k)

