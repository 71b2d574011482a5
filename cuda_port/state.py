"""Where sessions' states live on the card: slots of fixed size, and pages of compressed rows that sessions may share.

A slot has, layer by layer, the window's ring and the compressors' frontier rings of one session: all that is not
append-only. The token of position p lies in a ring at p modulo its length, so a step writes and reads with positions
alone, a copy of a slot is a place to rewind to, and nothing needs its length. A page has the compressed rows that
SPAN_TOKENS tokens make, in every layer: one table of pages is a session's share of all pools.
"""
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.sizes import Sizes, overlap, page_rows
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.errors import DoesNotFit
from ds4mlx.models.deepseek_v4.config import Config

ALIGN = 256


@dataclass(frozen=True, slots=True)
class Rings:
    """Of one compressor: where its frontier ring f32 [held, 2, columns] begins in a slot, and its pool's row."""
    name: str       # "comp" or "index", as arrays of a state are called
    offset: int
    held: int       # tokens
    columns: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """One layer's part of a slot."""
    ratio: int
    window: int                     # offset of the ring of raw rows
    compressors: tuple[Rings, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a slot, in bytes."""
    layers: tuple[LayerPlace, ...]
    slot_bytes: int
    page_bytes: int

    @classmethod
    def of(cls, config: Config, sizes: Sizes) -> "Layout":
        at, page, layers = 0, 0, []

        def reserve(count: int) -> int:
            nonlocal at
            start, at = at, at + -(-count // ALIGN) * ALIGN
            return start

        for ratio in config.compress_ratios:
            window = reserve(sizes.ring * sizes.row_bytes)
            kinds = [("comp", sizes.head_dim, sizes.row_bytes)] if ratio else []
            if ratio == 4:
                kinds.append(("index", sizes.index_dim, sizes.index_row_bytes))
            rings = []
            for name, width, row_bytes in kinds:
                held, columns = overlap(ratio) * ratio, overlap(ratio) * width
                rings.append(Rings(name, reserve(8 * held * columns), held, columns, row_bytes))
                page += page_rows(ratio) * row_bytes
            layers.append(LayerPlace(ratio, window, tuple(rings)))
        return cls(tuple(layers), at, page)


class Arena:
    """Slots and pages of all sessions. Page 0 belongs to nobody. `version` grows when arrays move: a captured graph
    that knows their addresses is then of no use."""

    def __init__(self, config: Config, sizes: Sizes, slots: int, pages: int) -> None:
        self.layout, self.sizes, self.version = Layout.of(config, sizes), sizes, 0
        self.slots = cp.zeros((slots, self.layout.slot_bytes), cp.uint8)
        self.logits = cp.zeros((slots, 2, config.vocab_size), cp.float32)    # a step writes the side that is not read
        self.pools: list[list[cp.ndarray]] = [
            [cp.zeros((pages + 1, page_rows(place.ratio) * ring.row_bytes), cp.uint8) for ring in place.compressors]
            for place in self.layout.layers]
        self._free_slots = list(range(slots))[::-1]
        self._free_pages = list(range(1, pages + 1))[::-1]
        self._held = np.zeros(pages + 1, np.int64)      # sessions that hold a page

    def window(self, layer: int) -> "cp.ndarray":
        """u8 [slots, ..]: all slots from where the layer's window begins."""
        return self.slots[:, self.layout.layers[layer].window:]

    def frontier(self, layer: int, compressor: int) -> "cp.ndarray":
        return self.slots[:, self.layout.layers[layer].compressors[compressor].offset:]

    def take_slot(self) -> int:
        if not self._free_slots:
            more = len(self.slots)
            self.slots = cp.concatenate([self.slots, cp.zeros_like(self.slots)])
            self.logits = cp.concatenate([self.logits, cp.zeros_like(self.logits)])
            self._free_slots = list(range(more, 2 * more))[::-1]
            self.version += 1
        return self._free_slots.pop()

    def give_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def take_page(self) -> int:
        if not self._free_pages:
            self._grow()
        page = self._free_pages.pop()
        self._held[page] = 1
        return page

    def share(self, page: int) -> None:
        self._held[page] += 1

    def drop(self, page: int) -> None:
        self._held[page] -= 1
        if not self._held[page]:
            self._free_pages.append(page)

    def own(self, page: int) -> int:
        """A page with the same rows that no other session holds: this one, or a copy."""
        if self._held[page] == 1:
            return page
        copy = self.take_page()
        for pools in self.pools:
            for pool in pools:
                pool[copy] = pool[page]
        self.drop(page)
        return copy

    def _grow(self) -> None:
        """A quarter more pages."""
        before = len(self._held)
        more = max(before // 4, 1)
        try:
            for pools in self.pools:
                for i, pool in enumerate(pools):
                    grown = cp.empty((before + more, pool.shape[1]), cp.uint8)
                    grown[:before] = pool
                    pools[i] = grown
        except cp.cuda.memory.OutOfMemoryError as full:
            raise DoesNotFit(f"{before - 1} pages of {SPAN_TOKENS} tokens are taken and there is no memory for more; "
                             "close sessions, or give a smaller --ctx") from full
        self._held = np.concatenate([self._held, np.zeros(more, np.int64)])
        self._free_pages = list(range(before, before + more))[::-1]
        self.version += 1
