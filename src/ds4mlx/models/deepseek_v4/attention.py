"""Attention: a window of the last tokens' rows, compressed rows behind it, and a sink; one row is key and value."""
import mlx.core as mx
import mlx.nn as nn

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.indexer import Indexer
from ds4mlx.models.deepseek_v4.layers import Chunk, Linear
from ds4mlx.models.deepseek_v4.state import LayerState, Rounding


class Attention(nn.Module):
    """Low-rank queries, one KV row a token, grouped low-rank output. Attributes are named as in the checkpoint."""

    def __init__(self, config: Config, ratio: int, rounding: Rounding) -> None:
        super().__init__()
        self.wq_a, self.wq_b, self.wkv, self.wo_a, self.wo_b = Linear(), Linear(), Linear(), Linear(), Linear()
        self.q_norm: mx.array | None = None
        self.kv_norm: mx.array | None = None
        self.attn_sink: mx.array | None = None
        self.config, self.ratio, self.packed = config, ratio, rounding == "official"
        if ratio:
            self.compressor = Compressor(config, ratio, config.head_dim, "fp8" if self.packed else None)
        if ratio == 4:
            self.indexer = Indexer(config, rounding)

    def __call__(self, x: mx.array, chunk: Chunk, state: LayerState) -> mx.array:
        """x [T, D], normalised, to [T, D]; `state` takes in the chunk."""
        c = self.config
        tables = chunk.tables(compressed=self.ratio > 0)
        choose = self.ratio == 4 and chunk.end // 4 > c.index_topk   # else every visible row is attended
        q, kv, weight = self._project(x, chunk, state, choose)
        qr, window = ops.latent(q, kv, self.q_norm, self.kv_norm, *tables, state.window, self.packed, c.rms_norm_eps)
        q, *index_q = ops.dense_matmuls(qr, [self.wq_b.weight, *([self.indexer.wq_b.weight] if choose else [])])
        rows = chosen = None
        if self.ratio and chunk.end >= self.ratio:
            rows = state.compressed.rows.view(chunk.end // self.ratio)
        if choose:
            chosen = self.indexer.select(*index_q, weight, tables, chunk, state.index.rows.view(chunk.end // 4))
        o = ops.attention(q, *tables, window, chunk.start, rows, chosen, self.ratio, self.attn_sink,
                          c.sliding_window, c.rms_norm_eps)
        state.window = window[-c.sliding_window:]
        low = self.wo_a(o.reshape(chunk.size, c.o_groups, -1), groups=c.o_groups)
        return self.wo_b(low.reshape(chunk.size, -1))

    def _project(self, x: mx.array, chunk: Chunk, state: LayerState,
                 choose: bool) -> tuple[mx.array, mx.array, mx.array | None]:
        """All that is computed from x, in one product: latent queries [T, Q], the raw row [T, D] and, if rows are to be
        chosen, the index heads' weights [T, heads]. The compressors take in what is theirs."""
        compressors = []
        if self.ratio:
            compressors.append((self.compressor, state.compressed))
        if self.ratio == 4:
            compressors.append((self.indexer.compressor, state.index))
        matrices = [self.wq_a, self.wkv, *(w for part, _ in compressors for w in (part.wkv, part.wgate))]
        if choose:
            matrices.append(self.indexer.weights_proj)
        q, kv, *rest = ops.dense_matmuls(x, [matrix.weight for matrix in matrices])
        for i, (part, its_state) in enumerate(compressors):
            part(rest[2 * i], rest[2 * i + 1], chunk, its_state)
        return q, kv, rest[-1] if choose else None
