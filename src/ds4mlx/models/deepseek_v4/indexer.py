"""Which compressed rows each query attends to, on the layers of ratio 4."""
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Batch, Chunk, Linear
from ds4mlx.models.deepseek_v4.stacked import StackedCompressor
from ds4mlx.models.deepseek_v4.state import CompressorState, Rounding

SCORE_FLOATS = 1 << 24  # of [tokens, rows] at once: 64 MiB, whatever the context


class Indexer(nn.Module):
    """Scores compressed rows with small vectors of its own; the best index_topk of the visible rows are attended."""

    def __init__(self, config: Config, rounding: Rounding) -> None:
        super().__init__()
        self.wq_b, self.weights_proj = Linear(), Linear()
        self.packed = rounding == "official"
        self.compressor = Compressor(config, 4, config.index_head_dim, "fp4" if self.packed else None)
        self.heads, self.width, self.k = config.index_n_heads, config.index_head_dim, config.index_topk

    def select(self, q: mx.array, weight: mx.array, tokens: Chunk | Batch,
               state: CompressorState | StackedCompressor) -> mx.array:
        """The k rows of each query, ascending, i32 [T, k]; where fewer are visible, hidden ones fill the rest.

        q [T, heads width] and weight [T, heads] are products of wq_b and weights_proj; more than k rows are visible to
        one query at least.
        """
        q = ops.index_queries(q.reshape(tokens.size, self.heads, self.width), *tokens.tables(True), self.packed)
        scale, count = (self.width * self.heads) ** -0.5, tokens.most(4)
        if isinstance(tokens, Batch):
            scores = ops.index_scores_step(q, weight, tokens.paged(state.pool), count, scale, tokens.at)
            return ops.select_rows(scores, tokens.at, 4, self.k)
        at_once, rows, parts = max(1, SCORE_FLOATS // count), state.rows.view(0, count), []
        for t in range(0, tokens.size, at_once):
            first, end = tokens.start + t, tokens.start + min(t + at_once, tokens.size)
            positions = mx.array(np.arange(first, end, dtype=np.int32))
            scores = ops.index_scores(q[t:t + at_once], weight[t:t + at_once], rows, scale, positions)
            parts.append(ops.select_rows(scores, positions, 4, self.k))
            if at_once < tokens.size:
                mx.eval(parts[-1])  # or the scores of several parts would be alive at once
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)
