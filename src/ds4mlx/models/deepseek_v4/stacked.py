"""Live state of B sequences side by side, in shapes that do not depend on their lengths: rings in place of windows and
frontiers. The token of position p lies at p modulo the ring's size, so a step overwrites what is no longer needed.
"""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import numpy as np

from ds4mlx.models.deepseek_v4.pages import Pool
from ds4mlx.models.deepseek_v4.state import CompressorState, LayerState


@dataclass(slots=True)
class StackedCompressor:
    """frontiers f32 [B, ring, 2, columns]: k and s of the last tokens, two groups of them where groups overlap."""
    frontiers: mx.array
    pool: Pool


@dataclass(slots=True)
class StackedLayer:
    """One layer of B sequences. windows [B, sliding_window, row]."""
    windows: mx.array
    compressed: StackedCompressor | None
    index: StackedCompressor | None

    @classmethod
    def of(cls, states: Sequence[LayerState], width: int) -> Self:
        """Some sequences' states of one layer; `width` is the sliding window."""
        ends = [state.offset for state in states]
        windows = mx.stack([_to_ring(state.window, end, width) for state, end in zip(states, ends, strict=True)])
        parts = [_stack([s.compressors()[i] for s in states], ends) for i in range(len(states[0].compressors()))]
        return cls(windows, *parts, *[None] * (2 - len(parts)))

    def compressors(self) -> list[StackedCompressor]:
        return [c for c in (self.compressed, self.index) if c is not None]

    def rings(self) -> list[mx.array]:
        return [self.windows, *(c.frontiers for c in self.compressors())]

    def with_rings(self, windows: mx.array, *frontiers: mx.array) -> Self:
        """A state of other rings over the same pools."""
        parts = [replace(c, frontiers=f) for c, f in zip(self.compressors(), frontiers, strict=True)]
        return type(self)(windows, *parts, *[None] * (2 - len(parts)))

    def copy(self) -> Self:
        """The same state, for a step that is not to change this one."""
        return self.with_rings(*self.rings())

    def pick(self, sequences: mx.array) -> Self:
        """Some of the sequences, i32 [b], in that order."""
        return self.with_rings(*(ring[sequences] for ring in self.rings()))

    def join(self, other: Self) -> Self:
        """The sequences of both, these first."""
        return self.with_rings(*map(mx.concatenate, zip(self.rings(), other.rings(), strict=True)))

    def unstack(self, sequence: int, state: LayerState, end: int) -> None:
        """Bring a sequence's own state of the layer to `end` tokens, from its place here."""
        windows, *frontiers = self.rings()
        state.window = _from_ring(windows[sequence], end, min(end, windows.shape[1]))
        for c, rings in zip(state.compressors(), frontiers, strict=True):
            ratio = c.rows.pool.ratio
            before = ratio if rings.shape[1] > ratio and end >= ratio else 0    # of the group before, if groups overlap
            c.frontier = _from_ring(rings[sequence], end, before + end % ratio)
        state.offset = end


def _stack(parts: Sequence[CompressorState], ends: Sequence[int]) -> StackedCompressor:
    pool, size = parts[0].rows.pool, parts[0].most_tokens
    return StackedCompressor(mx.stack([_to_ring(c.frontier, end, size) for c, end in zip(parts, ends, strict=True)]),
                             pool)


def _to_ring(rows: mx.array, end: int, size: int) -> mx.array:
    """What n <= size tokens left, the last of them at position end - 1, in their places of a ring; zeros elsewhere."""
    n, first = rows.shape[0], (end - rows.shape[0]) % size
    whole = mx.concatenate([rows, mx.zeros((size - n, *rows.shape[1:]), rows.dtype)]) if n < size else rows
    return mx.roll(whole, first, axis=0) if first else whole


def _from_ring(ring: mx.array, end: int, n: int) -> mx.array:
    """The inverse: what the n tokens before position `end` left, in order."""
    return ring[mx.array(np.arange(end - n, end) % ring.shape[0])]
