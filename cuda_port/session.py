"""The state of one conversation on the card: its tokens, its slot, its pages, and the places it can go back to."""
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port import transfer
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.state import Arena
from ds4mlx.engine.marks import least_useful
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import Config


@dataclass(frozen=True, slots=True)
class Mark:
    """All that is not append-only, at one length."""
    length: int
    slot: "cp.ndarray"      # u8 [slot bytes]
    logits: "cp.ndarray"    # f32 [V]


class CudaSession:
    """See engine.protocol.Session. most_marks: places to rewind to that it keeps."""

    def __init__(self, config: Config, arena: Arena, context: int, most_marks: int, packed: bool) -> None:
        self.tokens: list[int] = []
        self.context = context
        self.epoch = 0      # grows when rows that were there may be others from now on
        self.pages: list[int] = []
        self.slot, self.side = arena.take_slot(), 0     # side: of the slot's logits, the one that is read
        self.arena, self.config, self.packed = arena, config, packed
        self._marks: list[Mark] = []
        self._most_marks = most_marks

    def require_pages(self, end: int) -> None:
        """Before tokens up to position `end` are taken in: pages for their rows, that nobody else holds."""
        for i in range(len(self.tokens) // SPAN_TOKENS, len(self.pages)):
            self.pages[i] = self.arena.own(self.pages[i])
        while len(self.pages) * SPAN_TOKENS < end:
            self.pages.append(self.arena.take_page())

    def next_logits(self) -> "cp.ndarray":
        """f32 [V] on the card."""
        if not self.tokens:
            raise ValueError("an empty session has no next token; prefill first")
        return self.arena.logits[self.slot, self.side]

    def next_side(self) -> "cp.ndarray":
        """Where a step puts its logits; `turn` makes them the ones that are read."""
        return self.arena.logits[self.slot, 1 - self.side]

    def turn(self) -> None:
        self.side = 1 - self.side

    def logits(self) -> np.ndarray:
        return cp.asnumpy(self.next_logits())

    @property
    def marks(self) -> list[int]:
        return [mark.length for mark in self._marks]

    def mark(self) -> None:
        if not self.tokens or self._marks and self._marks[-1].length == len(self.tokens):
            return
        self._marks.append(self.here())
        if len(self._marks) > self._most_marks:
            del self._marks[least_useful(self.marks, len(self.tokens))]

    def rewind(self, length: int) -> int:
        if length >= len(self.tokens):
            return len(self.tokens)
        self._marks = [m for m in self._marks if m.length <= length]
        self.epoch += 1
        if not self._marks:
            self.tokens.clear()
            return 0
        self.go_to(self._marks[-1])
        return len(self.tokens)

    def branch(self, other: "CudaSession", length: int) -> int:
        """See engine.protocol.Session.branch."""
        if other is self:
            return self.rewind(length)
        length = min(length, self.context)
        if 0 < len(other.tokens) <= length:
            mark = other.here()
        else:
            mark = max((m for m in other._marks if m.length <= length), key=lambda m: m.length, default=None)
        if mark is None:
            self._become([], [])
            return 0
        pages = other.pages[:-(-mark.length // SPAN_TOKENS)]
        for page in pages:
            self.arena.share(page)
        self._become(other.tokens[:mark.length], pages)
        self._put_back(mark)
        self.mark()
        return mark.length

    def here(self) -> Mark:
        return Mark(len(self.tokens), self.arena.slots[self.slot].copy(), self.next_logits().copy())

    def go_to(self, mark: Mark) -> None:
        self._put_back(mark)
        del self.tokens[mark.length:]

    def _put_back(self, mark: Mark) -> None:
        self.arena.slots[self.slot] = mark.slot
        self.arena.logits[self.slot, self.side] = mark.logits

    def _become(self, tokens: list[int], pages: list[int]) -> None:
        for page in self.pages:
            self.arena.drop(page)
        self.epoch += 1
        self.tokens[:], self.pages, self._marks = tokens, pages, []

    def snapshot(self) -> "CudaSnapshot":
        return CudaSnapshot(self)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        n = schema.check(self.config, arrays, self.packed)
        if not 0 < n <= self.context:
            raise CheckpointError(f"state covers {n} tokens, this session takes 1 to {self.context}")
        if not np.isfinite(arrays["logits"]).all():
            raise CheckpointError("state holds logits that are not finite; it is damaged")
        pages = [self.arena.take_page() for _ in range(-(-n // SPAN_TOKENS))]
        self._become(arrays["tokens"].tolist(), pages)
        transfer.put_rows(self.arena, arrays, pages)
        self.arena.slots[self.slot] = cp.asarray(transfer.slot_of(self.arena, arrays, n))
        self.arena.logits[self.slot, self.side] = cp.asarray(arrays["logits"])
        self.mark()

    def close(self) -> None:
        if self.slot >= 0:
            self._become([], [])
            self.arena.give_slot(self.slot)
            self.slot = -1


class CudaSnapshot:
    """See engine.protocol.Snapshot. Holds a copy of what is not append-only; rows are read from the session itself."""

    def __init__(self, session: CudaSession) -> None:
        self.tokens = np.array(session.tokens, np.uint32)
        self._session, self._epoch, self._at = session, session.epoch, session.here()

    def head(self, spans: int) -> dict[str, np.ndarray]:
        self._check()
        n, arena = len(self.tokens), self._session.arena
        arrays = {"tokens": self.tokens, "logits": cp.asnumpy(self._at.logits)}
        small = transfer.arrays_of(arena, cp.asnumpy(self._at.slot), n)
        rows = transfer.rows_of(arena, self._session.pages, spans * SPAN_TOKENS, n)
        return arrays | {name: small.get(name, rows.get(name)) for name in schema.arrays(
            self._session.config, n, self._session.packed) if name not in arrays}

    def span(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self.tokens) // SPAN_TOKENS:
            raise ValueError(f"span {index} of a state of {len(self.tokens)} tokens")
        self._check()
        return transfer.rows_of(self._session.arena, self._session.pages, index * SPAN_TOKENS,
                                (index + 1) * SPAN_TOKENS)

    def _check(self) -> None:
        if self._session.epoch != self._epoch or not self._session.tokens:
            raise CheckpointError("the session has gone back since its snapshot was taken; take another one")
