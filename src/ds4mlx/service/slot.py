"""One slot of the engine: a live state, all that leads back to it, and its way to disk and from there.

Everything here runs on the engine thread. A state on disk can fail in any way without failing a request.
"""
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ds4mlx.engine.protocol import SPAN_TOKENS, Engine, Session
from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.explain import Explanation, Origin, explain
from ds4mlx.sessions.header import Reason
from ds4mlx.sessions.lookup import (
    Live, Plan, RewindPoint, Source, Stored, VisibleKey, Wanted, decide, still_bound, tool_state_gone)
from ds4mlx.sessions.policy import Boundary, SaveRules, crosses, prefill_boundaries
from ds4mlx.sessions.saving import SaveJob
from ds4mlx.sessions.store import Candidate, Store
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.keys import GrowingKey
from ds4mlx.text.segments import ASSISTANT, USER
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WAIT_S: dict[Reason, float] = {"cold": 2.0, "evict": 2.0, "shutdown": 30.0}  # for the writer to be free


class Wish(Protocol):
    """What a slot asks of a request."""
    wanted: Wanted
    origins: Sequence[Origin]

    def after_key(self, key_bytes: int) -> list[int]: ...   # ids of what follows so much of the request's key


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request begins: `reused` tokens are in the session, `rest` is to be prefilled."""
    source: Source
    reused: int
    rest: list[int]
    explanation: Explanation
    file: str = ""      # of a state that came from disk

    @property
    def total(self) -> int:
        return self.reused + len(self.rest)


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer's state is to be closed: with these tokens behind the last sampled one, or not at all (None).

    visible: the keys that a client may come back with, bound to the length that is then reached.
    """
    closing: tuple[int, ...] | None = None
    visible: Callable[[int], tuple[VisibleKey, ...]] = lambda frontier: ()
    call_ids: frozenset[str] = frozenset()


class Slot:
    """A session, with a store or without one."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, context: int, store: Store | None,
                 rules: SaveRules, chunk: int, number: int = 0) -> None:
        self.session: Session = engine.open(context)
        self._tokenizer, self._store, self._rules, self._chunk, self._number = tokenizer, store, rules, chunk, number
        self._key = GrowingKey(tokenizer)
        self._point_keys: dict[int, int] = {}       # key bytes of the lengths that can be gone back to
        self._visible: tuple[VisibleKey, ...] = ()
        self._call_ids: frozenset[str] = frozenset()
        self._calls_at = 0
        self._asked_at = 0                          # length at which a continued save was last considered

    # ---- a request begins

    def begin(self, wish: Wish) -> Start:
        """Bring the session to the longest beginning of the request that can be had. Raises BadRequest when the request
        goes on from a state that is gone."""
        stored = self._stored(wish.wanted.key)
        live = self._live()
        decision = decide(wish.wanted, live, [known for known, _ in stored])
        explanation = explain(decision, wish.wanted, live, wish.origins)
        if not decision.plans:
            raise tool_state_gone(wish.wanted.results)
        files = {known.name: candidate for known, candidate in stored}
        for plan in decision.plans:
            if self._reach(plan, files, wish):
                break
        self._visible = still_bound(self._visible, plan.tokens) if not plan.replaces_live else ()
        self._asked_at = plan.tokens
        if self._store is not None and not plan.replaces_live:
            self._store.continued(self._number)
        return Start(plan.source, plan.tokens, self._rest(plan, wish), explanation,
                     plan.stored.name if plan.stored else "")

    def _stored(self, key: bytes) -> list[tuple[Stored, Candidate]]:
        if self._store is None:
            return []
        return [(Stored(c.name, c.tokens, c.text_bytes), c) for c in self._store.find(key, self._number).candidates]

    def _live(self) -> Live:
        tokens = self.session.tokens
        if not tokens:
            return Live()
        points = tuple(RewindPoint(at, self._point_key(at)) for at in self.session.marks if at < len(tokens))
        return Live(tokens, self._key.of(tokens), self._visible, points, self._call_ids, self._calls_at)

    def _point_key(self, at: int) -> int:
        if at not in self._point_keys:
            self._point_keys[at] = len(self._tokenizer.key_bytes_of_ids(self.session.tokens[:at]))
        return self._point_keys[at]

    def _reach(self, plan: Plan, files: dict[str, Candidate], wish: Wish) -> bool:
        if plan.source == "disk-text":
            return self._restore(files[plan.stored.name], wish.wanted.key)
        if plan.source == "none":
            self.save("evict")
        if plan.tokens < len(self.session.tokens):
            reached = self.session.rewind(plan.tokens)
            self._forget_after(reached)
            return reached == plan.tokens
        return True

    def _restore(self, candidate: Candidate, key: bytes) -> bool:
        """From disk; what was live is saved first, when it is known that the file can take its place."""
        self._store.pin(candidate.name)
        try:
            restored = self._store.load(candidate, key, self._number)
            self.save("evict")
            self.session.restore(restored.arrays)
        except CheckpointError as fault:
            log.info("kv cache file not used: %s", fault)
            return False
        finally:
            self._store.release(candidate.name)
        self._forget_after(0)
        return True

    def _rest(self, plan: Plan, wish: Wish) -> list[int]:
        ids = wish.wanted.ids
        begins_alike = plan.then == "ids" or plan.stored and list(ids[:plan.tokens]) == list(self.session.tokens)
        return list(ids[plan.tokens:]) if begins_alike else wish.after_key(plan.key_bytes)

    def _forget_after(self, length: int) -> None:
        self._point_keys = {at: key for at, key in self._point_keys.items() if at <= length}
        if self._calls_at > length:
            self._call_ids, self._calls_at = frozenset(), 0

    # ---- it goes on

    def boundaries(self, start: Start) -> list[Boundary]:
        """Where the prefill stops to save."""
        if self._store is None:
            return []
        return prefill_boundaries(self._rules, start.total, self._chat_anchor(start), start.reused, self._chunk)

    def _chat_anchor(self, start: Start) -> int | None:
        """The place of the last user turn before the first answer: what stands before it is stable."""
        user, assistant = (self._tokenizer.control[literal] for literal in (USER, ASSISTANT))
        ids = [*self.session.tokens, *start.rest]
        first = ids.index(assistant) if assistant in ids else len(ids)
        return next((i for i in range(first - 1, -1, -1) if ids[i] == user), None)

    def mark(self) -> None:
        self.session.mark()

    def crossed(self) -> bool:
        """Whether the session has grown past a place of a continued save since this was last asked."""
        before, self._asked_at = self._asked_at, len(self.session.tokens)
        return self._store is not None and crosses(self._rules, before, self._asked_at)

    def bind(self, visible: tuple[VisibleKey, ...], call_ids: frozenset[str]) -> None:
        """What the client may send back of the session as it is now."""
        self._visible += visible
        self._call_ids, self._calls_at = call_ids, len(self.session.tokens)

    # ---- to disk

    def save(self, reason: Reason, blocks: tuple[ToolBlock, ...] = ()) -> None:
        """Hand the session as it is to the writer, unless it is not worth it."""
        n = len(self.session.tokens)
        if self._store is None or not n:
            return
        tokens = np.array(self.session.tokens, np.uint32)
        if why := self._store.why_not_save(reason, tokens):
            log.debug("kv cache skipped tokens=%d because %s", n, why)
            return
        snapshot = self.session.snapshot()
        rows = {span: snapshot.span(span) for span in self._store.missing_spans(tokens)}
        aliases = tuple((key.key, key.kind) for key in self._visible if key.frontier == n)
        job = SaveJob(self._key.of(self.session.tokens), "token-text", reason, snapshot.head(n // SPAN_TOKENS), rows,
                      aliases, blocks)
        if not self._store.save(job, WAIT_S.get(reason, 0.0)):
            log.info("kv cache skipped tokens=%d because the writer is busy", n)

    def spoiled(self, file: str, why: str) -> None:
        """What came of a file could not be computed with: it is set aside."""
        if self._store is not None and file:
            self._store.quarantine(file, why)
