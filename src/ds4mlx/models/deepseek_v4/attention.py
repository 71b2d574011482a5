"""Attention: a window of the last tokens' rows, compressed rows behind it, and a sink; one row is key and value."""
import mlx.core as mx
import mlx.nn as nn

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.indexer import Indexer
from ds4mlx.models.deepseek_v4.layers import Batch, Chunk, Linear, Tables
from ds4mlx.models.deepseek_v4.stacked import StackedLayer
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

    def __call__(self, x: mx.array, tokens: Chunk | Batch, state: LayerState | StackedLayer) -> mx.array:
        """x [T, D], normalised, to [T, D]; `state` takes in the tokens."""
        c = self.config
        tables = tokens.tables(compressed=self.ratio > 0)
        choose = self.ratio == 4 and tokens.most(4) > c.index_topk      # else every visible row is attended
        q, kv, weight = self._project(x, tokens, state, choose)
        before = state.window if isinstance(state, LayerState) else state.windows[0, :0]
        qr, rows = ops.latent(q, kv, self.q_norm, self.kv_norm, *tables, before, self.packed, c.rms_norm_eps)
        q, *index_q = ops.dense_matmuls(qr, [self.wq_b.weight, *([self.indexer.wq_b.weight] if choose else [])])
        chosen = self.indexer.select(*index_q, weight, tables, tokens, state.index) if choose else None
        attend = self._attend_chunk if isinstance(tokens, Chunk) else self._attend_batch
        o = attend(q, rows, chosen, tables, tokens, state)
        low = self.wo_a(o.reshape(tokens.size, c.o_groups, -1), groups=c.o_groups)
        return self.wo_b(low.reshape(tokens.size, -1))

    def _attend_chunk(self, q: mx.array, window: mx.array, chosen: mx.array | None, tables: Tables, chunk: Chunk,
                      state: LayerState) -> mx.array:
        """window [R0 + T, row]: the rows of the tokens before, and the chunk's own."""
        c, rows = self.config, None
        if self.ratio and chunk.end >= self.ratio:
            rows = state.compressed.rows.view(0, chunk.most(self.ratio))
        state.window = window[-c.sliding_window:]
        return ops.attention(q, *tables, window, chunk.start, rows, chosen, self.ratio, self.attn_sink,
                             c.sliding_window, c.rms_norm_eps)

    def _attend_batch(self, q: mx.array, rows: mx.array, chosen: mx.array | None, tables: Tables, batch: Batch,
                      state: StackedLayer) -> mx.array:
        """rows [B, row]: the tokens' own."""
        state.windows = batch.into_rings(state.windows, rows)
        paged = batch.paged(state.compressed.pool) if self.ratio else None
        most = batch.most(self.ratio) if self.ratio else 0
        return ops.attention_step(q, *tables, state.windows, batch.at, paged, most, chosen, self.ratio, self.attn_sink,
                                  self.config.rms_norm_eps)

    def _project(self, x: mx.array, tokens: Chunk | Batch, state: LayerState | StackedLayer,
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
            part(rest[2 * i], rest[2 * i + 1], tokens, its_state)
        return q, kv, rest[-1] if choose else None
