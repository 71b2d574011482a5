"""The state of one conversation in MLX: its tokens, its layers' caches, and the places it can go back to."""
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ds4mlx.engine.marks import least_useful
from ds4mlx.engine.mlx_stack import Stack
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.pages import Pages
from ds4mlx.models.deepseek_v4.state import CompressorState, LayerMark, LayerState, Pools

MARKS = 16            # places to rewind to that a session keeps


@dataclass(frozen=True, slots=True)
class Mark:
    length: int
    layers: tuple[LayerMark, ...]
    logits: mx.array | None    # None at length 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session that decodes has its state: in a stack, beside others'."""
    stack: Stack
    row: int


class MLXSession:
    """See engine.protocol.Session. most_marks: places to rewind to that it keeps; rows go to `pools`, or to some of its
    own; `others` are all sessions that have theirs there; early: on devices that compute while the host goes on.

    While it decodes, the state is in a stack, and `cache` lags behind until somebody asks for it.
    """

    def __init__(self, model: Model, context: int, most_marks: int = MARKS, pools: Pools | None = None,
                 others: Collection["MLXSession"] = (), early: bool = False) -> None:
        self.tokens: list[int] = []
        self.context = context
        self.epoch = 0      # grows when rows that were there may be others from now on
        self.cache: list[LayerState] = model.make_cache(context, pools)
        self.table = self.cache[0].table
        self.place: Place | None = None
        self._model, self._others, self._early = model, others, early
        self._next: mx.array | None = None
        self._marks: list[Mark] = []
        self._most_marks = most_marks
        self._start = self._here()

    def feed(self, tokens: list[int]) -> None:
        """Take tokens in. On failure the session is as it was before."""
        self.require_of(self.table.pages)
        self.require_room(len(tokens))
        self.leave()
        before = self._here()
        mx.synchronize()    # a step begun ahead still reads the pools, and MLX would copy them to write to them
        try:
            streams, update = self._model.chunk(mx.array(tokens, mx.int32), self.cache, self._early)
            self._next = self._model.logits(streams[-1:], update.rows(slice(-1, None)))[0]
            mx.eval(self._next, [layer.state for layer in self.cache])
        except BaseException:
            self._go_to(before)
            self.table.pages.settle()
            raise
        self.tokens.extend(tokens)

    def require_open(self) -> None:
        """Raises ValueError where it is closed."""
        if self.closed:
            raise ValueError("the session is closed; open another one")

    def require_of(self, pages: Pages) -> None:
        """Raises ValueError where it is closed, or has no rows in these pages."""
        self.require_open()
        if self.table.pages is not pages:
            raise ValueError("the session is another engine's, and its rows are not here; open one of this engine")
        if self.table.lost:
            raise ValueError("the session lost its rows when the device failed; close it and open another one")

    def require_room(self, tokens: int) -> None:
        """Raises ValueError where so many more do not fit."""
        if len(self.tokens) + tokens > self.context:
            raise ValueError(f"{len(self.tokens)} + {tokens} tokens, context is {self.context}")

    def advance(self, token: int, place: Place) -> None:
        """The token has been taken in, and this is where that left the state."""
        self.tokens.append(token)
        self.place = place

    def settle(self) -> None:
        """Bring `cache` up to the tokens."""
        if self.place is None or self.cache[-1].offset == len(self.tokens):     # the last one to be brought there
            return
        self._next = self.place.stack.unstack(self.place.row, self.cache, len(self.tokens))
        # Not waited for: the device may have the next step before it.
        mx.async_eval(self._next, [(layer.window, *(c.frontier for c in layer.compressors())) for layer in self.cache])

    def leave(self) -> None:
        """Settle, and have no more part in a stack."""
        self.settle()
        self.place = None

    def next_logits(self) -> mx.array:
        """f32 [V] on the device."""
        if not self.tokens:
            raise ValueError("an empty session has no next token; prefill first")
        return self._next if self.place is None else self.place.stack.logits[self.place.row]

    def logits(self) -> np.ndarray:
        return np.array(self.next_logits())

    @property
    def marks(self) -> list[int]:
        return [] if self.table.lost else [mark.length for mark in self._marks]

    def mark(self) -> None:
        if not self.tokens or self._marks and self._marks[-1].length == len(self.tokens):
            return
        self._marks.append(self._here())
        if len(self._marks) > self._most_marks:
            del self._marks[least_useful(self.marks, len(self.tokens))]

    def rewind(self, length: int) -> int:
        if length >= len(self.tokens) and not self.table.lost:
            return len(self.tokens)
        self._marks = [m for m in self._marks if m.length <= length and not self.table.lost]
        mark = self._marks[-1] if self._marks else self._start
        self.epoch += 1
        self.place = None
        del self.tokens[mark.length:]
        self._go_to(mark)
        return mark.length

    def branch(self, other: "MLXSession", length: int) -> int:
        self.require_open()
        if other is self:
            return self.rewind(length)
        other.require_of(self.table.pages)
        reachable = [*other._marks, *([other._here()] if len(other.tokens) <= length else [])]
        mark = max((m for m in reachable if m.length <= min(length, self.context)), key=lambda m: m.length,
                   default=self._start)
        self.table.share(other.table, mark.length)
        self._forget()
        self._go_to(mark)
        self.tokens[:] = other.tokens[:mark.length]
        self.mark()
        return mark.length

    def _forget(self) -> None:
        """Another state is to come."""
        self.epoch += 1
        self.place, self._marks = None, []

    def _here(self) -> Mark:
        self.settle()
        return Mark(len(self.tokens), tuple(layer.mark() for layer in self.cache), self._next)

    def _go_to(self, mark: Mark) -> None:
        for layer, state in zip(self.cache, mark.layers, strict=True):
            layer.rewind(state)
        self._next = mark.logits
        self.table.cut(mark.length)

    def snapshot(self) -> "MLXSnapshot":
        return MLXSnapshot(self)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.require_open()
        n = schema.check(self._model.config, arrays, packed=self._model.rounding == "official")
        if not 0 < n <= self.context:
            raise CheckpointError(f"state covers {n} tokens, this session takes 1 to {self.context}")
        if not np.isfinite(arrays["logits"]).all():
            raise CheckpointError("state holds logits that are not finite; it is damaged")
        self._forget()
        self.tokens.clear()
        self._go_to(self._start)
        mx.synchronize()    # as before a prefill
        try:
            self._fill(arrays, n, self._share(arrays))
        except BaseException:
            self._go_to(self._start)
            self.table.pages.settle()
            raise
        self.tokens[:] = arrays["tokens"].tolist()
        self.mark()

    def _share(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Share the most whole spans that another session has as well, bit for bit; returns their number."""
        found = [(_common(other.tokens, arrays["tokens"]) // SPAN_TOKENS, other) for other in self._others
                 if other is not self and not other.table.lost]
        for spans, other in sorted(found, key=lambda one: one[0], reverse=True):
            if spans and other._has_rows(arrays, spans):
                self.table.share(other.table, spans * SPAN_TOKENS)
                return spans
        return 0

    def _has_rows(self, arrays: Mapping[str, np.ndarray], spans: int) -> bool:
        held = schema.rows_of(self._model.config, 0, spans * SPAN_TOKENS)
        return all(np.array_equal(np.array(c.rows.view(0, held[rows].stop)), arrays[rows][held[rows]])
                   for i, layer in enumerate(self.cache) for rows, _, c in _compressors(i, layer))

    def _fill(self, arrays: Mapping[str, np.ndarray], n: int, spans: int) -> None:
        """All but the rows of the first spans, which are there."""
        held = schema.rows_of(self._model.config, 0, spans * SPAN_TOKENS)
        for i, layer in enumerate(self.cache):
            layer.offset, layer.window = n, mx.array(arrays[f"L{i}.raw"])
            for rows, frontier, c in _compressors(i, layer):
                c.rows.write(held[rows].stop, mx.array(arrays[rows][held[rows].stop:]))
                k, s = (schema.unpack_frontier(arrays[f"{frontier}_{part}"], n, layer.ratio)
                        for part in ("kv", "score"))
                c.frontier = mx.array(np.stack([k, s], axis=1))
        mx.eval([layer.state for layer in self.cache])
        self._next = mx.array(arrays["logits"])

    @property
    def closed(self) -> bool:
        return not self.cache

    def close(self) -> None:
        self.tokens.clear()
        self.table.close()
        self.place, self._marks, self._next = None, [], None
        self.cache = []


class MLXSnapshot:
    """See engine.protocol.Snapshot. Holds what is not append-only, and reads rows from the session itself: a reference
    to their pool would make the next step copy it."""

    def __init__(self, session: MLXSession) -> None:
        self.tokens = np.array(session.tokens, np.uint32)
        self._session, self._config = session, session._model.config
        self._epoch, self._at = session.epoch, session._here()

    def head(self, spans: int) -> dict[str, np.ndarray]:
        n, held = len(self.tokens), schema.rows_of(self._config, 0, spans * SPAN_TOKENS)
        self._check()
        arrays = {"tokens": self.tokens, "logits": np.array(self._at.logits)}
        for i, (layer, mark) in enumerate(zip(self._session.cache, self._at.layers, strict=True)):
            arrays[f"L{i}.raw"] = np.array(mark.window)
            for (rows, frontier, c), ks in zip(_compressors(i, layer), mark.frontiers, strict=True):
                arrays[rows] = np.array(c.rows.view(held[rows].stop, n // layer.ratio))
                k, s = np.array(ks).swapaxes(0, 1)
                arrays[f"{frontier}_kv"] = schema.pack_frontier(k, n, layer.ratio, 0.0)
                arrays[f"{frontier}_score"] = schema.pack_frontier(s, n, layer.ratio, -np.inf)
        return arrays

    def span(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self.tokens) // SPAN_TOKENS:
            raise ValueError(f"span {index} of a state of {len(self.tokens)} tokens")
        self._check()
        held = schema.rows_of(self._config, index * SPAN_TOKENS, (index + 1) * SPAN_TOKENS)
        return {rows: np.array(c.rows.view(held[rows].start, held[rows].stop))
                for i, layer in enumerate(self._session.cache) for rows, _, c in _compressors(i, layer)}

    def _check(self) -> None:
        if self._session.epoch != self._epoch or not self._session.tokens or self._session.table.lost:
            raise CheckpointError("the session has gone back since its snapshot was taken; take another one")


def _compressors(i: int, layer: LayerState) -> list[tuple[str, str, CompressorState]]:
    named = [(f"L{i}.comp", f"L{i}.cstate", layer.compressed), (f"L{i}.index", f"L{i}.istate", layer.index)]
    return [entry for entry in named if entry[2] is not None]


def _common(some: Sequence[int], others: np.ndarray) -> int:
    """Tokens that both begin with."""
    n = min(len(some), len(others))
    differ = np.flatnonzero(np.array(some[:n], np.uint32) != others[:n])
    return int(differ[0]) if differ.size else n
