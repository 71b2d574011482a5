"""Rows of many sequences in one pool, in pages of one size; a page may belong to several sequences."""
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Paged:
    """Row r of sequence b is rows[pages[b, r // page_rows] * page_rows + r % page_rows].

    Rows that a sequence does not see may hold anything, even what is not finite: another one may have left it there.
    """
    rows: mx.array     # [pages of the pool * page_rows, row]
    pages: mx.array    # i32 [B, P]; entries not held are 0, a page that belongs to nobody
    page_rows: int

    @property
    def most(self) -> int:
        """Rows that a sequence may have by its page table."""
        return self.pages.shape[1] * self.page_rows

    def at(self, r: mx.array) -> mx.array:
        """The rows r i32 [B, K], or [K] of every sequence, [B, K, row]."""
        r = mx.broadcast_to(r, (self.pages.shape[0], r.shape[-1]))
        page = mx.take_along_axis(self.pages, r // self.page_rows, axis=1)
        return self.rows[page * self.page_rows + r % self.page_rows]
