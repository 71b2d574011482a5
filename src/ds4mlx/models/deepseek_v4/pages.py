"""Compressed rows of many sequences in common pools, by pages that are counted, shared, and copied before a write.

A page is PAGE_TOKENS tokens of one sequence: in each pool, the rows that those tokens complete. The same number names
a page in every pool. Page 0 belongs to nobody: rows that are not meant to be kept are written there.
"""
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Self

import mlx.core as mx
import numpy as np

from ds4mlx.models.deepseek_v4 import schema

PAGE_TOKENS = 2048
_VERSIONS = count()


def page_count(tokens: int) -> int:
    """Pages that hold the rows of so many tokens."""
    return -(-tokens // PAGE_TOKENS)


class Pool:
    """The rows of one compressor of one layer, of all sequences: `rows` [pages * page_rows, width]."""

    __slots__ = ("rows", "page_rows", "ratio")

    def __init__(self, ratio: int, row: schema.Row) -> None:
        self.ratio, self.page_rows = ratio, PAGE_TOKENS // ratio
        self.rows = mx.zeros((0, row.width), mx.uint8 if row.dtype == np.uint8 else mx.float32)

    @classmethod
    def of_rows(cls, ratio: int, rows: mx.array) -> Self:
        """The pool whose rows are these."""
        pool = cls.__new__(cls)
        pool.ratio, pool.page_rows, pool.rows = ratio, PAGE_TOKENS // ratio, rows
        return pool

    @property
    def page_bytes(self) -> int:
        return self.page_rows * self.rows.shape[1] * self.rows.itemsize

    def grow(self, pages: int) -> None:
        """To so many pages, or as it was where there is no memory for them."""
        more = pages * self.page_rows - self.rows.shape[0]
        if more > 0:
            rows = mx.concatenate([self.rows, mx.zeros((more, self.rows.shape[1]), self.rows.dtype)])
            mx.eval(rows)       # or every pool would be there twice at once
            self.rows = rows

    def settle(self) -> bool:
        """Compute the rows that are pending. False where that fails: all rows are zeros then."""
        try:
            mx.eval(self.rows)
        except Exception:
            self.rows = mx.zeros(self.rows.shape, self.rows.dtype)
            return False
        return True

    def copy(self, source: int, target: int) -> None:
        page = self.rows[source * self.page_rows:(source + 1) * self.page_rows]
        self.rows[target * self.page_rows:(target + 1) * self.page_rows] = page


class Pages:
    """Which pages of some pools are in use, and by how many sequences. Grows by half, never past what it may hold."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.pools = tuple(pools)
        self._holders = [1]         # of each page there is; page 0 is held for good
        self._promised = 0          # to the tables that know how many they will need at most
        self._unbounded = 0         # tables that do not
        self.losses = 0             # times that all rows were lost
        self._grow(2)

    @property
    def held(self) -> int:
        """Pages that some sequence holds, page 0 aside."""
        return sum(holders > 0 for holders in self._holders) - 1

    @property
    def capacity(self) -> int:
        """Pages that the pools have room for, page 0 included."""
        return len(self._holders)

    @property
    def nbytes(self) -> int:
        return sum(pool.rows.nbytes for pool in self.pools)

    def promise(self, pages: int | None) -> None:
        """One more sequence, of so many pages at most; None: nobody knows."""
        self._promised += pages or 0
        self._unbounded += pages is None

    def forget(self, pages: int | None) -> None:
        """The inverse of `promise`."""
        self._promised -= pages or 0
        self._unbounded -= pages is None

    def take(self, after: int) -> int:
        """A free page, held once; the one behind `after` if that is free, for neighbours are read without a copy."""
        if 0 not in self._holders:
            half_more = self.capacity * 3 // 2
            self._grow(max(self.capacity + 1, half_more if self._unbounded else min(half_more, 1 + self._promised)))
        near = after + 1
        page = near if near < self.capacity and not self._holders[near] else self._holders.index(0)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> int:
        self._holders[page] += 1
        return page

    def release(self, page: int) -> None:
        assert page and self._holders[page], f"page {page} is nobody's"
        self._holders[page] -= 1

    def own(self, page: int, after: int) -> int:
        """The page itself where one sequence holds it, else a copy in its place."""
        if self._holders[page] == 1:
            return page
        mx.synchronize()    # MLX would copy a whole pool that work in flight still reads
        mine = self.take(after)
        for pool in self.pools:
            pool.copy(page, mine)
        self.release(page)
        return mine

    def settle(self) -> None:
        """After a failure. Everybody's rows wait for writes that are pending, so where these cannot be computed either,
        all rows are lost, and all that is left is to begin anew."""
        settled = [pool.settle() for pool in self.pools]
        self.losses += not all(settled)

    def _grow(self, pages: int) -> None:
        for pool in self.pools:
            pool.grow(pages)
        self._holders += [0] * (pages - len(self._holders))


class PageTable:
    """The pages of one sequence: entry i holds the rows of tokens [PAGE_TOKENS i, PAGE_TOKENS (i + 1)).

    With a `context` it needs no more pages than that many tokens, and all tables together find room for theirs.
    `version` is another one after each change, and no two tables ever have the same.
    """

    def __init__(self, pages: Pages, context: int | None = None) -> None:
        self.pages, self.entries = pages, []
        self._losses = pages.losses     # before the first of these rows
        self.version = next(_VERSIONS)
        most = None if context is None else page_count(context)
        pages.promise(most)
        self.close = weakref.finalize(self, _give_back, pages, self.entries, most)
        self.close.atexit = False

    @property
    def lost(self) -> bool:
        """Whether its rows are."""
        return bool(self.entries) and self._losses < self.pages.losses

    def hold(self, start: int, end: int) -> None:
        """Have room for the rows of tokens start … end - 1, after those before, in pages that no one else sees."""
        if not self.entries:
            self._losses = self.pages.losses
        for i in range(start // PAGE_TOKENS, page_count(end)):
            after = self.entries[i - 1] if i else 0
            if i == len(self.entries):
                self.entries.append(self.pages.take(after))
            elif (mine := self.pages.own(self.entries[i], after)) != self.entries[i]:
                self.entries[i] = mine
            else:
                continue
            self.version = next(_VERSIONS)

    def cut(self, tokens: int) -> None:
        """Let go of the pages behind those of the first `tokens` tokens."""
        while len(self.entries) > page_count(tokens):
            self.pages.release(self.entries.pop())
            self.version = next(_VERSIONS)

    def share(self, other: "PageTable", tokens: int) -> None:
        """Hold the rows of the first `tokens` tokens of `other`, and nothing else."""
        shared = [self.pages.share(page) for page in other.entries[:page_count(tokens)]]
        self.cut(0)
        self.entries += shared
        self._losses = other._losses
        self.version = next(_VERSIONS)


class SequenceRows:
    """The rows of one sequence in one pool."""

    __slots__ = ("pool", "table")

    def __init__(self, pool: Pool, table: PageTable) -> None:
        self.pool, self.table = pool, table

    def write(self, first: int, rows: mx.array) -> None:
        """Rows `first` and on, in pages that no other sequence sees."""
        self.table.hold(first * self.pool.ratio, (first + rows.shape[0]) * self.pool.ratio)
        done = 0
        for start, stop in self._runs(first, first + rows.shape[0]):
            self.pool.rows[start:stop] = rows[done:done + stop - start]
            done += stop - start

    def view(self, first: int, last: int) -> mx.array:
        """Rows first … last - 1: a slice where their pages are neighbours, else a copy."""
        parts = [self.pool.rows[start:stop] for start, stop in self._runs(first, last)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts) if parts else self.pool.rows[:0]

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Where these rows lie in the pool, as few slices as there can be."""
        size, start = self.pool.page_rows, None
        for page in range(first // size, -(-last // size)) if first < last else ():
            base = (self.table.entries[page] - page) * size
            begin, end = base + max(first, page * size), base + min(last, (page + 1) * size)
            if start is not None and begin != stop:
                yield start, stop
                start = None
            start, stop = begin if start is None else start, end
        if start is not None:
            yield start, stop


def _give_back(pages: Pages, entries: list[int], most: int | None) -> None:
    while entries:
        pages.release(entries.pop())
    pages.forget(most)
