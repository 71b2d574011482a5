"""Tokens to compressed rows, and the frontier between them: the tokens of the group that is still open."""
import mlx.core as mx
import mlx.nn as nn

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Batch, Chunk, Linear
from ds4mlx.models.deepseek_v4.stacked import StackedCompressor
from ds4mlx.models.deepseek_v4.state import CompressorState
from ds4mlx.ops.kv_round import Packing


class Compressor(nn.Module):
    """One row for every `ratio` tokens (`ops.compress_step`). Attributes are named as in the checkpoint."""

    def __init__(self, config: Config, ratio: int, width: int, packing: Packing | None) -> None:
        super().__init__()
        columns = width * 2 if ratio == 4 else width
        self.wkv, self.wgate = Linear(), Linear()
        self.ape: mx.array | None = None    # [ratio, columns], added to the score of the token's place in its group
        self.norm: mx.array | None = None
        self.ratio, self.columns, self.packing, self.eps = ratio, columns, packing, config.rms_norm_eps

    def __call__(self, k: mx.array, s: mx.array, chunk: Chunk, state: CompressorState) -> None:
        """Keep the rows that the products k, s [T, columns] of wkv and wgate complete, and what is still needed."""
        state.frontier, rows = ops.compress_step(k, s, state.frontier, self.ape, self.norm,
                                                 *chunk.group_tables(self.ratio), chunk.start, self.ratio, self.packing,
                                                 self.eps)
        if rows is not None:
            state.rows.write(chunk.start // self.ratio, rows)

    def group(self, k: mx.array, s: mx.array, batch: Batch, state: StackedCompressor) -> ops.Group:
        """The same of a step, for `ops.keep_step` to do."""
        return ops.Group(k, s, state.frontiers, self.ape, self.norm, *batch.group_tables(self.ratio), self.packing)
