"""Live state of one sequence, layer by layer: append-only rows, the window, and the compressors' frontiers.

Everything but the append-only rows is small, and MLX arrays are values: a mark to rewind to holds references and row
counts, so it costs no copy and no time, whatever the length.
"""
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import Config

Rounding = Literal["official", "none"]  # of rows before they are stored: the model's own FP8 and FP4, or none
GROW_ROWS = 256  # smallest step in which a buffer of rows grows


class Rows:
    """Append-only rows [count, width] in a buffer that grows by half, while it can to no more than `most` rows; cutting
    back only lowers the count."""

    __slots__ = ("count", "most", "_buffer")

    def __init__(self, row: schema.Row, most: int | None = None) -> None:
        self.count, self.most = 0, most
        self._buffer = no_rows(row)

    def append(self, rows: mx.array) -> None:
        end = self.count + rows.shape[0]
        if end > self._buffer.shape[0]:
            grown = max(end, self._buffer.shape[0] * 3 // 2)
            size = -(-grown // GROW_ROWS) * GROW_ROWS
            if self.most is not None:
                size = max(end, min(size, self.most))
            fresh = mx.zeros((size - self.count, self._buffer.shape[1]), self._buffer.dtype)
            self._buffer = mx.concatenate([self._buffer[:self.count], fresh])
        self._buffer[self.count:end] = rows
        self.count = end

    def view(self, count: int | None = None) -> mx.array:
        """The first `count` rows, all by default."""
        return self._buffer[:self.count if count is None else count]

    @property
    def buffer(self) -> mx.array:
        return self._buffer


def no_rows(row: schema.Row) -> mx.array:
    return mx.zeros((0, row.width), mx.uint8 if row.dtype == np.uint8 else mx.float32)


class CompressorState:
    """Rows made so far, and the frontier f32 [n, 2, columns]: k and s of the tokens still needed, the open group's, and
    for ratio 4 also those of the group before, of which only the carry halves are read again."""

    __slots__ = ("rows", "frontier")

    def __init__(self, ratio: int, width: int, row: schema.Row, context: int | None) -> None:
        self.rows = Rows(row, None if context is None else context // ratio)
        self.frontier = mx.zeros((0, 2, width * 2 if ratio == 4 else width))


@dataclass(frozen=True, slots=True)
class LayerMark:
    """What a layer needs to be at an earlier length again: references, and counts of its append-only rows."""
    offset: int
    window: mx.array
    frontiers: tuple[tuple[int, mx.array], ...]


class LayerState:
    """One layer's cache, in the shape that mlx-lm expects of one (`offset`, `state`, `nbytes`, not trimmable).

    With a `context` its buffers never grow past what that many tokens need.
    """

    def __init__(self, config: Config, layer: int, rounding: Rounding, context: int | None = None) -> None:
        self.ratio = config.compress_ratios[layer]
        self.offset = 0                                                       # tokens taken in
        row = schema.attention_row(config, rounding == "official")
        self.window = no_rows(row)                                            # the last sliding_window raw rows
        self.compressed = self.index = None
        if self.ratio:
            self.compressed = CompressorState(self.ratio, config.head_dim, row, context)
        if self.ratio == 4:
            self.index = CompressorState(4, config.index_head_dim, schema.index_row(config, rounding == "official"),
                                         context)

    def compressors(self) -> list[CompressorState]:
        return [c for c in (self.compressed, self.index) if c is not None]

    def mark(self) -> LayerMark:
        return LayerMark(self.offset, self.window, tuple((c.rows.count, c.frontier) for c in self.compressors()))

    def rewind(self, mark: LayerMark) -> None:
        self.offset, self.window = mark.offset, mark.window
        for c, (count, frontier) in zip(self.compressors(), mark.frontiers, strict=True):
            c.rows.count, c.frontier = count, frontier

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for mx.eval: evaluated every step, so that no graph and no old buffer stays alive."""
        return [self.window] + [a for c in self.compressors() for a in (c.rows.buffer, c.frontier)]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.state)

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return self.offset == 0
