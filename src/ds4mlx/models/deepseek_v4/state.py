"""Live state of one sequence, layer by layer: the window, the compressors' frontiers, and rows in a pool's pages.

Everything but the append-only rows is small, and MLX arrays are values: a mark to rewind to holds references and a
length, so it costs no copy and no time, whatever the length.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import mlx.core as mx
import numpy as np

from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.pages import Pages, PageTable, Pool, SequenceRows

Rounding = Literal["official", "none"]  # of rows before they are stored: the model's own FP8 and FP4, or none


class LayerPools(NamedTuple):
    """Where a layer's rows are; None where it has no such compressor."""
    compressed: Pool | None
    index: Pool | None

    @classmethod
    def of(cls, config: Config, layer: int, rounding: Rounding) -> Self:
        """Pools of no page yet."""
        ratio, packed = config.compress_ratios[layer], rounding == "official"
        return cls(Pool(ratio, schema.attention_row(config, packed)) if ratio else None,
                   Pool(ratio, schema.index_row(config, packed)) if ratio == 4 else None)


class Pools:
    """The rows of all layers, of all sequences that share these pages."""

    def __init__(self, config: Config, rounding: Rounding) -> None:
        self.layers = [LayerPools.of(config, i, rounding) for i in range(config.num_hidden_layers)]
        self.pages = Pages([pool for layer in self.layers for pool in layer if pool is not None])

    def written_bytes(self, positions: Sequence[int]) -> int:
        """Bytes of the pools that a step of these positions writes rows to."""
        return sum(pool.rows.nbytes for pool in self.pages.pools if any((p + 1) % pool.ratio == 0 for p in positions))


class CompressorState:
    """Rows made so far, and the frontier f32 [n, 2, columns]: k and s of the tokens still needed, the open group's, and
    for ratio 4 also those of the group before, of which only the carry halves are read again."""

    __slots__ = ("rows", "frontier", "most_tokens")

    def __init__(self, rows: SequenceRows, width: int) -> None:
        self.rows = rows
        self.most_tokens, *token = schema.frontier_shape(rows.pool.ratio, width)
        self.frontier = mx.zeros((0, *token))


@dataclass(frozen=True, slots=True)
class LayerMark:
    """What a layer needs to be at an earlier length again, beside the rows it has still."""
    offset: int
    window: mx.array
    frontiers: tuple[mx.array, ...]


class LayerState:
    """One layer's cache, in the shape that mlx-lm expects of one (`offset`, `state`, `nbytes`, not trimmable)."""

    def __init__(self, config: Config, layer: int, rounding: Rounding, pools: LayerPools, table: PageTable) -> None:
        self.ratio = config.compress_ratios[layer]
        self.offset = 0                                                       # tokens taken in
        self.table = table                                                    # of all layers
        row = schema.attention_row(config, rounding == "official")
        self.window = mx.zeros((0, row.width), mx.uint8 if row.dtype == np.uint8 else mx.float32)   # the last raw rows
        self.compressed = self.index = None
        if pools.compressed:
            self.compressed = CompressorState(SequenceRows(pools.compressed, table), config.head_dim)
        if pools.index:
            self.index = CompressorState(SequenceRows(pools.index, table), config.index_head_dim)

    def compressors(self) -> list[CompressorState]:
        return [c for c in (self.compressed, self.index) if c is not None]

    def mark(self) -> LayerMark:
        return LayerMark(self.offset, self.window, tuple(c.frontier for c in self.compressors()))

    def rewind(self, mark: LayerMark) -> None:
        self.offset, self.window = mark.offset, mark.window
        for c, frontier in zip(self.compressors(), mark.frontiers, strict=True):
            c.frontier = frontier

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for mx.eval: evaluated every step, so that no graph and no old buffer stays alive."""
        return [self.window] + [a for c in self.compressors() for a in (c.rows.pool.rows, c.frontier)]

    @property
    def nbytes(self) -> int:
        """Rows count by whole pages."""
        held = sum(len(self.table.entries) * c.rows.pool.page_bytes + c.frontier.nbytes for c in self.compressors())
        return self.window.nbytes + held

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return self.offset == 0
