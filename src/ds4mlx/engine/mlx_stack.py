"""The state of several sequences side by side, as a decode step takes and leaves it."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from ds4mlx.models.deepseek_v4.layers import Batch
from ds4mlx.models.deepseek_v4.stacked import StackedLayer
from ds4mlx.models.deepseek_v4.state import LayerState

Layers = tuple[StackedLayer, ...]
ModelStep = Callable[[Batch, Sequence[StackedLayer]], mx.array]     # see graph.Model.step


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """B sequences after a step: the layers' state, and the logits f32 [B, V] of what comes next. A value: the next step
    makes another one."""
    layers: Layers
    logits: mx.array

    @classmethod
    def step(cls, step: ModelStep, batch: Batch, before: Layers) -> Self:
        """One token more of each sequence, not computed yet."""
        layers = tuple(layer.copy() for layer in before)
        logits = step(batch, layers)
        return cls(layers, logits)

    def pick(self, rows: Sequence[int]) -> Self:
        """Some of the sequences, in that order."""
        return type(self)(pick(self.layers, rows), self.logits[mx.array(rows, mx.int32)])

    def unstack(self, row: int, cache: Sequence[LayerState], end: int) -> mx.array:
        """Bring a sequence's own cache to `end` tokens, from its row here; returns its logits [V]."""
        for layer, state in zip(self.layers, cache, strict=True):
            layer.unstack(row, state, end)
        return self.logits[row]

    def arrays(self) -> list[mx.array]:
        """Everything that the step computes, for evaluation."""
        return [self.logits, *(a for layer in self.layers for a in layer.rings()),
                *(c.pool.rows for layer in self.layers for c in layer.compressors())]


def stack(caches: Sequence[Sequence[LayerState]], window: int) -> Layers:
    """Sequences that were alone until here, side by side; `window` is the model's sliding window."""
    return tuple(StackedLayer.of(states, window) for states in zip(*caches, strict=True))


def pick(layers: Layers, rows: Sequence[int]) -> Layers:
    which = mx.array(rows, mx.int32)
    return tuple(layer.pick(which) for layer in layers)


def join(some: Layers, more: Layers) -> Layers:
    """The sequences of both, in this order."""
    return tuple(mine.join(theirs) for mine, theirs in zip(some, more, strict=True))
