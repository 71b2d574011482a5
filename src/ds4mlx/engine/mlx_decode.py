"""One decode step for many sessions: one forward pass, one draw, and the next pass begun before the tokens are read."""
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ds4mlx.engine import mlx_stack
from ds4mlx.engine.mlx_sampling import Choice
from ds4mlx.engine.mlx_session import MLXSession, Place
from ds4mlx.engine.mlx_stack import Layers, Stack
from ds4mlx.engine.protocol import Row, Step
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.layers import Batch
from ds4mlx.models.deepseek_v4.pages import PageTable
from ds4mlx.models.deepseek_v4.state import Pools
from ds4mlx.models.deepseek_v4.traced import traceable

# Of pools that a step begun ahead may write to: MLX copies an array whose last reader is still to run, where otherwise
# it writes in place. As much takes a millisecond or less, which is what a step ahead saves.
COPIED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A step begun before anybody asked for it: `after` is what `tokens` make of `before`, row by row."""
    before: Stack
    tokens: list[int]
    after: Stack


class Decoder:
    """Keeps the sessions that decode side by side from step to step, and puts them together anew when that changes.

    With `lookahead` a step's tokens are fed to the model before the host has read them. The next step begins there if
    it brings these tokens; what it does not ask for is dropped.
    """

    def __init__(self, model: Model, pools: Pools, lookahead: bool) -> None:
        self.lookahead = lookahead
        self._model, self._pools, self._step = model, pools, traceable(model)
        self._stack: Stack | None = None
        self._stacked: list[weakref.ref[MLXSession]] = []    # by row of the stack; those that left are among them
        self._ahead: Ahead | None = None
        self._tables = PageTables()

    def decode(self, rows: Sequence[Row]) -> list[Step]:
        """Feed each row's token, then sample the next. On failure every session is as it was before, but for rows that
        the device may have lost (`Pages.settle`)."""
        if not rows:
            return []
        self._check(rows)
        try:
            return self._decode(rows)
        except BaseException:
            self._pools.pages.settle()
            raise

    def _decode(self, rows: Sequence[Row]) -> list[Step]:
        fed, rest = self._in_order([row for row in rows if row.token is not None]), [r for r in rows if r.token is None]
        after = self._forward(fed) if fed else None
        logits = [after.logits] if after else []
        if rest:
            logits.append(mx.stack([row.session.next_logits() for row in rest]))
        choice = Choice.of(logits[0] if len(logits) == 1 else mx.concatenate(logits), fed + rest)
        mx.async_eval(choice.arrays(), after.arrays() if after else [])
        begun = None if rest else self._begin(fed, after, choice.tokens)
        steps = choice.steps(fed + rest)
        if after:
            self._commit(fed, after)
        self._ahead = begun and Ahead(after, [step.token for step in steps], begun)
        of_row = {id(row): step for row, step in zip(fed + rest, steps, strict=True)}
        return [of_row[id(row)] for row in rows]

    def forget(self) -> None:
        """Drop what was begun: the model has changed."""
        self._ahead, self._step = None, traceable(self._model)

    def _in_order(self, fed: list[Row]) -> list[Row]:
        """As they stand in the stack, the others behind."""
        places = {id(row): row.session.place.row for row in fed if self._has(row)}
        return sorted(fed, key=lambda row: places.get(id(row), len(self._stacked)))

    def _has(self, row: Row) -> bool:
        return row.session.place is not None and row.session.place.stack is self._stack

    def _check(self, rows: Sequence[Row]) -> None:
        vocab = self._model.config.vocab_size
        if len({id(row.session) for row in rows}) < len(rows):
            raise ValueError("a session is there twice, and takes one token in a step")
        for row in rows:
            row.session.require_of(self._pools.pages)
            if row.mask is not None and row.mask.shape != (vocab,):
                raise ValueError(f"a mask of {row.mask.shape}, needed {(vocab,)}: one for each token")
            if row.token is not None:
                row.session.require_room(1)
                if not 0 <= row.token < vocab:
                    raise ValueError(f"token {row.token}, vocabulary has {vocab}")

    def _forward(self, fed: Sequence[Row]) -> Stack:
        """The sessions of `fed`, in that order, with their tokens taken in."""
        ahead, self._ahead = self._ahead, None
        places = [row.session.place.row if self._has(row) else None for row in fed]
        if ahead and all(place is not None and ahead.tokens[place] == row.token
                         for place, row in zip(places, fed, strict=True)):
            return ahead.after if len(fed) == len(ahead.tokens) else ahead.after.pick(places)
        ids = mx.array([row.token for row in fed], mx.int32)
        return Stack.step(self._step, self._batch(fed, ids, 0), self._before(fed, places))

    def _before(self, fed: Sequence[Row], places: Sequence[int | None]) -> Layers:
        """The sessions side by side: those that are in the stack first."""
        staying = [place for place in places if place is not None]
        if len(staying) == len(fed) == len(self._stacked):
            return self._stack.layers
        joining = [row.session for row in fed[len(staying):]]
        assert all(session.place is None for session in joining), "their caches are behind"
        parts = [mlx_stack.pick(self._stack.layers, staying)] if staying else []
        if joining:
            window = self._model.config.sliding_window
            parts.append(mlx_stack.stack([session.cache for session in joining], window))
        return parts[0] if len(parts) == 1 else mlx_stack.join(*parts)

    def _batch(self, fed: Sequence[Row], ids: mx.array, skipped: int) -> Batch:
        """The step of `ids` [B], `skipped` tokens behind what the sessions cover."""
        positions = [len(row.session.tokens) + skipped for row in fed]
        for row, position in zip(fed, positions, strict=True):
            row.session.table.hold(position, position + 1)
        tables = self._tables.of([row.session.table for row in fed])
        return Batch(self._model.config, ids, np.array(positions), tables)

    def _begin(self, fed: Sequence[Row], after: Stack, tokens: mx.array) -> Stack | None:
        """The next step, if all goes on as it should; None where there is no room for one or it would copy too much."""
        if not self.lookahead or any(len(row.session.tokens) + 2 > row.session.context for row in fed):
            return None
        if self._pools.written_bytes([len(row.session.tokens) + 1 for row in fed]) > COPIED_BYTES:
            return None
        begun = Stack.step(self._step, self._batch(fed, tokens, 1), after.layers)
        mx.async_eval(begun.arrays())
        return begun

    def _commit(self, fed: Sequence[Row], after: Stack) -> None:
        """Nothing here fails behind the first session that advances."""
        staying = {id(row.session) for row in fed}
        for session in filter(None, (ref() for ref in self._stacked)):
            if id(session) not in staying and session.place is not None and session.place.stack is self._stack:
                session.leave()     # or it would keep the state of all of them alive
        for i, row in enumerate(fed):
            row.session.advance(row.token, Place(after, i))
        self._stack, self._stacked = after, [weakref.ref(row.session) for row in fed]


class PageTables:
    """The page tables of a batch as one array, made anew only where one has changed."""

    def __init__(self) -> None:
        self._key: list[int] = []
        self._made = np.zeros((0, 0), np.int32)

    def of(self, tables: Sequence[PageTable]) -> np.ndarray:
        """i32 [B, P], 0 behind the last page of a table."""
        key = [table.version for table in tables]
        if key != self._key:
            self._made = np.zeros((len(tables), max(len(table.entries) for table in tables)), np.int32)
            for made, table in zip(self._made, tables, strict=True):
                made[:len(table.entries)] = table.entries
            self._key = key
        return self._made
