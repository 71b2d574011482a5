"""Which rows of a state lie in its head and which in segments, by the engine's own list of its arrays.

The engine says, for any number of tokens, every array of a state: name -> (shape, dtype), `tokens` and `logits` first.
Arrays named `L{i}.comp…` and `L{i}.index…` grow by a fixed number of rows a span; the rest is always in the head.
"""
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ds4mlx.sessions.container import Arrays
from ds4mlx.sessions.identity import SPAN_TOKENS

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
    rows = {(int(found[1]), found[2]): shape[0] for name, (shape, _) in whole.items()
            if (found := _ROWS.fullmatch(name))}
    layers = range(1 + max((layer for layer, _ in rows), default=-1))
    return RowCounts(*(tuple(rows.get((layer, kind), 0) for layer in layers) for kind in ("raw", "comp", "index")))


def head_arrays(layout: Layout, tokens: int, spans: int) -> Arrays:
    """What a head of `tokens` tokens holds when its first `spans` spans lie in segments."""
    held = segment_arrays(layout)
    return {name: ((shape[0] - spans * held[name][0][0], *shape[1:]), dtype) if name in held else (shape, dtype)
            for name, (shape, dtype) in layout(tokens).items()}


def segment_arrays(layout: Layout) -> Arrays:
    """What a segment holds: the append-only rows of one span."""
    return {name: array for name, array in layout(SPAN_TOKENS).items() if is_append_only(name)}


def empty_arrays(arrays: Arrays) -> dict[str, np.ndarray]:
    """Uninitialised arrays to read into."""
    return {name: np.empty(shape, dtype) for name, (shape, dtype) in arrays.items()}


def head_views(whole: Mapping[str, np.ndarray], layout: Layout, spans: int) -> dict[str, np.ndarray]:
    """Views of the arrays of a whole state: what its head holds, to write it or to read into."""
    held = segment_arrays(layout)
    return {name: array[spans * held[name][0][0]:] if name in held else array for name, array in whole.items()}


def segment_views(whole: Mapping[str, np.ndarray], layout: Layout, span: int) -> dict[str, np.ndarray]:
    """Views of the arrays of a whole state: the rows of one span, to write it or to read into."""
    return {name: whole[name][span * shape[0]:(span + 1) * shape[0]]
            for name, (shape, _) in segment_arrays(layout).items()}


_ROWS = re.compile(r"L([0-9]+)\.(raw|comp|index)")
