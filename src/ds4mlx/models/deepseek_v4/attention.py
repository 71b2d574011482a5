"""Attention: a window of the last tokens' rows, compressed rows behind it, and a sink; one row is key and value."""
import mlx.core as mx
import mlx.nn as nn

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.indexer import Indexer
from ds4mlx.models.deepseek_v4.layers import Batch, Chunk, Linear
from ds4mlx.models.deepseek_v4.stacked import StackedLayer
from ds4mlx.models.deepseek_v4.state import LayerState, Rounding

Products = list[tuple[mx.array, mx.array]]  # k and s of compressors


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
        choose = self.ratio == 4 and tokens.most(4) > c.index_topk      # else every visible row is attended
        qr, window, weight = self._take_in(x, tokens, state, choose)
        q, *index_q = ops.dense_matmuls(qr, [self.wq_b.weight, *([self.indexer.wq_b.weight] if choose else [])])
        chosen = self.indexer.select(*index_q, weight, tokens, state.index) if choose else None
        o = self.attend(q, window, chosen, tokens, state)
        return self.wo_b(self.wo_a(o, groups=c.o_groups))

    def _take_in(self, x: mx.array, tokens: Chunk | Batch, state: LayerState | StackedLayer,
                 choose: bool) -> tuple[mx.array, mx.array, mx.array | None]:
        """`_keep` of what `_project` gives, none of which outlives this; and the index heads' weights."""
        q, kv, products, weight = self._project(x, choose)
        return *self._keep(q, kv, products, tokens, state), weight

    def _compressors(self) -> list[Compressor]:
        return ([self.compressor] if self.ratio else []) + ([self.indexer.compressor] if self.ratio == 4 else [])

    def _project(self, x: mx.array, choose: bool) -> tuple[mx.array, mx.array, Products, mx.array | None]:
        """All that is computed from x, in one product: latent queries [T, Q], the raw row [T, D], k and s of each
        compressor [T, columns] and, if rows are to be chosen, the index heads' weights [T, heads]."""
        matrices = [self.wq_a, self.wkv, *(w for part in self._compressors() for w in (part.wkv, part.wgate))]
        if choose:
            matrices.append(self.indexer.weights_proj)
        q, kv, *rest = ops.dense_matmuls(x, [matrix.weight for matrix in matrices])
        weight = rest.pop() if choose else None
        return q, kv, list(zip(rest[::2], rest[1::2], strict=True)), weight

    def _keep(self, q: mx.array, kv: mx.array, products: Products, tokens: Chunk | Batch,
              state: LayerState | StackedLayer) -> tuple[mx.array, mx.array]:
        """Queries, normalised, [T, Q]; and the raw rows to attend to: those before and the chunk's own [R0 + T, row],
        or each sequence's ring [B, W, row]. The state keeps the last ones, and the compressors what is theirs."""
        norms, tables, eps = (self.q_norm, self.kv_norm), tokens.tables(self.ratio > 0), self.config.rms_norm_eps
        parts = list(zip(self._compressors(), state.compressors(), products, strict=True))
        if isinstance(tokens, Batch):
            groups = [part.group(k, s, tokens, its) for part, its, (k, s) in parts]
            qr, state.windows, kept = ops.keep_step(q, kv, *norms, *tables, state.windows, tokens.at, self.packed, eps,
                                                    groups)
            for (_, its, _), (frontiers, rows) in zip(parts, kept, strict=True):
                its.frontiers = frontiers
                tokens.keep(rows, its.pool)
            return qr, state.windows
        for part, its, (k, s) in parts:
            part(k, s, tokens, its)
        qr, window = ops.latent(q, kv, *norms, *tables, state.window, self.packed, eps)
        state.window = mx.contiguous(window[-self.config.sliding_window:])     # a slice would keep the chunk's alive
        return qr, window

    def attend(self, q: mx.array, window: mx.array, chosen: mx.array | None, tokens: Chunk | Batch,
               state: LayerState | StackedLayer) -> mx.array:
        """q [T, H D] over the raw rows and the compressed rows behind them, all or those chosen, to [T, H D]."""
        c, tables = self.config, tokens.tables(self.ratio > 0)
        most = tokens.most(self.ratio) if self.ratio else 0
        if isinstance(tokens, Batch):
            rows = tokens.paged(state.compressed.pool) if most else None
            return ops.attention_step(q, *tables, window, tokens.at, rows, most, chosen, self.ratio, self.attn_sink,
                                      c.rms_norm_eps)
        rows = state.compressed.rows.view(0, most) if most else None
        return ops.attention(q, *tables, window, tokens.start, rows, chosen, self.ratio, self.attn_sink,
                             c.sliding_window, c.rms_norm_eps)
