"""Which rows of a state lie in its head and which in segments, by the engine's own list of its arrays.

The engine says, for any number of tokens, every array of a state: name -> (shape, dtype), `tokens` and `logits` first.
Arrays named `L{i}.comp…` and `L{i}.index…` grow by a fixed number of rows a span; the rest is always in the head.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, tuple[tuple[int, ...], np.dtype]]
Layout = Callable[[int], Arrays]  # tokens -> arrays of a state that covers them, in storage order


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of a whole state, one number a layer; 0 where a layer has none."""
    raw: tuple[int, ...]
    comp: tuple[int, ...]
    index: tuple[int, ...]


def is_append_only(name: str) -> bool:
    """Whether an array only ever grows: compressed and indexer rows."""
    return name.rpartition(".")[2].startswith(("comp", "index"))


def row_counts(whole: Arrays) -> RowCounts:
    """Rows of each layer of a state with these arrays."""
    raise NotImplementedError


def head_arrays(layout: Layout, tokens: int, spans: int) -> Arrays:
    """What a head of `tokens` tokens holds when its first `spans` spans lie in segments."""
    raise NotImplementedError


def segment_arrays(layout: Layout) -> Arrays:
    """What a segment holds: the append-only rows of one span."""
    raise NotImplementedError


def empty_arrays(arrays: Arrays) -> dict[str, np.ndarray]:
    """Uninitialised arrays to read into."""
    return {name: np.empty(shape, dtype) for name, (shape, dtype) in arrays.items()}


def head_views(whole: Mapping[str, np.ndarray], layout: Layout, spans: int) -> dict[str, np.ndarray]:
    """Views of the arrays of a whole state: what its head holds, to write it or to read into."""
    raise NotImplementedError


def segment_views(whole: Mapping[str, np.ndarray], layout: Layout, span: int) -> dict[str, np.ndarray]:
    """Views of the arrays of a whole state: the rows of one span, to write it or to read into."""
    raise NotImplementedError
