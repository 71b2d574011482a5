"""What the parts of the graph share: products with file blocks, and the tokens at hand, of one sequence or of many."""
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.pages import PAGE_TOKENS, Pool

Tables = tuple[mx.array, mx.array]  # cos and sin


class Linear(nn.Module):
    """y = x W^T with W [out, in] kept in its file's blocks. No bias anywhere in this model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: ops.Blocks | None = None  # set by weights.load

    def __call__(self, x: mx.array, groups: int = 1) -> mx.array:
        return ops.dense_matmul(x, self.weight, groups)


def rotary(config: Config, positions: np.ndarray, compressed: bool) -> Tables:
    """cos and sin [positions, pairs], for layers with or without compression."""
    cos, sin = rope.tables(positions, rope.frequencies(config, compressed))
    return mx.array(cos), mx.array(sin)


@dataclass(frozen=True)
class Chunk:
    """T consecutive tokens on their way through the layers: ids i32 [T] at positions start … start + T - 1."""
    config: Config
    ids: mx.array
    start: int
    _groups: dict[int, Tables] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.ids.shape[0]

    @property
    def end(self) -> int:
        return self.start + self.size

    def most(self, ratio: int) -> int:
        """Compressed rows that the last token sees."""
        return self.end // ratio

    def tables(self, compressed: bool) -> Tables:
        """cos and sin of the tokens' positions, [T, pairs], for layers with or without compression."""
        return self._compressed if compressed else self._plain

    @cached_property
    def _plain(self) -> Tables:
        return rotary(self.config, np.arange(self.start, self.end), False)

    @cached_property
    def _compressed(self) -> Tables:
        return rotary(self.config, np.arange(self.start, self.end), True)

    def group_tables(self, ratio: int) -> Tables:
        """The same of the first positions of the groups of `ratio` tokens that the chunk completes."""
        if ratio not in self._groups:
            groups = np.arange(self.start // ratio, self.end // ratio)
            self._groups[ratio] = rotary(self.config, groups * ratio, True)
        return self._groups[ratio]


@dataclass(frozen=True)
class Batch:
    """One token of each of B sequences: ids i32 [B] at `positions` [B], which the host knows even where the ids are
    still being computed. `pages` i32 [B, P] are the sequences' page tables, 0 where nothing is held."""
    config: Config
    ids: mx.array
    positions: np.ndarray
    pages: np.ndarray
    _groups: dict[int, Tables] = field(default_factory=dict, repr=False)
    _places: dict[int, mx.array | None] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.ids.shape[0]

    def most(self, ratio: int) -> int:
        """Compressed rows that the longest sequence's token sees."""
        return (int(self.positions.max()) + 1) // ratio

    def tables(self, compressed: bool) -> Tables:
        """cos and sin of the tokens' positions, [B, pairs], for layers with or without compression."""
        return self._compressed if compressed else self._plain

    @cached_property
    def _plain(self) -> Tables:
        return rotary(self.config, self.positions, False)

    @cached_property
    def _compressed(self) -> Tables:
        return rotary(self.config, self.positions, True)

    def group_tables(self, ratio: int) -> Tables:
        """The same of the first position of the group of `ratio` tokens that each token belongs to."""
        if ratio not in self._groups:
            self._groups[ratio] = rotary(self.config, self.positions // ratio * ratio, True)
        return self._groups[ratio]

    @cached_property
    def at(self) -> mx.array:
        """The positions, i32 [B], on the device."""
        return mx.array(self.positions.astype(np.int32))

    @cached_property
    def _page_tables(self) -> mx.array:
        return mx.array(self.pages)

    def paged(self, pool: Pool) -> ops.Paged:
        """The sequences' rows in the pool."""
        return ops.Paged(pool.rows, self._page_tables, pool.page_rows)

    def keep(self, rows: mx.array, pool: Pool) -> None:
        """Write rows [B, row] to the pool: to page 0, which nobody reads, where a token's group is still open."""
        ratio = pool.ratio
        if ratio not in self._places:
            places = self.places(ratio)
            self._places[ratio] = None if places is None else mx.array(places)
        if self._places[ratio] is not None:
            pool.rows[self._places[ratio]] = rows

    def places(self, ratio: int) -> np.ndarray | None:
        """Where the tokens' rows belong in a pool of that ratio, i32 [B]; None where no token completes a group."""
        complete = (self.positions + 1) % ratio == 0
        page = np.where(complete, self.pages[np.arange(self.size), self.positions // PAGE_TOKENS], 0)
        places = page * (PAGE_TOKENS // ratio) + self.positions % PAGE_TOKENS // ratio
        return places.astype(np.int32) if complete.any() else None
