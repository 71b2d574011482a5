"""One slot of the engine: a live state, all that leads back to it, and its way to disk and from there.

Everything here runs on the engine thread. A state on disk can fail in any way without failing a request. What takes
long comes in pieces, between which other slots decode.
"""
import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from ds4mlx.engine.protocol import Engine, Session
from ds4mlx.errors import BadRequest, CheckpointError
from ds4mlx.service.export import Export
from ds4mlx.sessions.explain import Explanation, Origin, Row, explain, first_mismatch
from ds4mlx.sessions.header import Reason
from ds4mlx.sessions.lookup import (
    MIN_REWIND, VISIBLE, Decision, Live, Other, Outcome, Plan, RewindPoint, Source, Stored, Verdict, VisibleKey, Wanted,
    branch, clean_cut, decide, still_bound, tool_state_gone)
from ds4mlx.sessions.policy import GAIN, SaveRules, crosses, prefill_boundaries
from ds4mlx.sessions.saving import SaveJob
from ds4mlx.sessions.store import Candidate, Store
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.keys import GrowingKey, tokens_within
from ds4mlx.text.segments import ASSISTANT, USER
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
WAIT_S: dict[Reason, float] = {"cold": 2.0, "evict": 2.0, "shutdown": 30.0}  # for the writer to be free
POLL_S = 0.002
Pieces = Generator[bool, None, T]     # yields whether anything was done, or only waited for; returns a T


class Wish(Protocol):
    """What a slot asks of a request."""
    wanted: Wanted
    origins: Sequence[Origin]

    def after_key(self, key_bytes: int) -> list[int]: ...   # ids of what follows so much of the request's key
    def declined(self, start: "Start") -> None: ...           # it cannot begin: its state is gone
    def saves(self, reason: Reason, tokens: int) -> None: ...   # a state of so many tokens goes to disk


@dataclass(frozen=True, slots=True)
class Start:
    """Where a request begins: `reused` tokens are in the session, `rest` is to be prefilled."""
    source: Source
    reused: int
    rest: list[int]
    explanation: Explanation
    file: str = ""      # of a state that came from disk
    rejected: tuple[tuple[str, str], ...] = ()  # files that fit and may not be used, and why
    mismatch: tuple[Row, ...] = ()              # tokens around the place where prompt and live state part
    slot: int = 0
    donor: int | None = None    # the slot that the reused tokens are shared with

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


Others = Callable[[], "dict[int, tuple[Slot, bool]]"]   # the other slots by number, and whether nothing is added


class Slot:
    """A session, with a store or without one."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, context: int, store: Store | None,
                 rules: SaveRules, chunk: int, number: int = 0) -> None:
        self.session: Session = engine.open(context)
        self.number = number
        self.used_at = 0.0                          # seconds of the monotonic clock; 0: never
        self.hints: tuple[str, ...] = ()            # by which the client of its last request tells conversations apart
        self._tokenizer, self._store, self._rules, self._chunk, self._context = tokenizer, store, rules, chunk, context
        self._key = GrowingKey(tokenizer)
        self._point_keys: dict[int, int] = {}       # key bytes of the lengths that can be gone back to
        self._visible: tuple[VisibleKey, ...] = ()
        self._call_ids: frozenset[str] = frozenset()
        self._calls_at = 0
        self._blocks: dict[ToolBlock, int] = {}     # sampled calls of the history, and a length that holds them
        self._asked_at = 0                          # length at which a continued save was last considered
        self._export: Export | None = None          # a save that was begun
        self._job: tuple[SaveJob, float] | None = None      # what came of it, and until when it waits for the writer
        self._restored = ""                         # file that the present request went on from
        self._said_as: Wanted | None = None         # a request that the session holds in other words than its own

    # ---- a request begins

    def offered(self, *, resting: bool, at: int | None = None) -> Other:
        """What other slots may branch from, of all lengths or just one. resting: nothing is being added, so that the
        present length will do too."""
        live = self._live(whole=resting or len(self.session.tokens) in self.session.marks)
        points = live.points if at is None else tuple(point for point in live.points if point.frontier == at)
        return Other(self.number, replace(live, points=points))

    def would_reuse(self, wanted: Wanted) -> Plan | None:
        """How the request would go on in this slot, by nothing but its state; None where it cannot be answered."""
        return decide(wanted, self._live()).best

    def would_have(self, wanted: Wanted) -> int | None:
        """Tokens that the request would go on from in this slot, by its state or the disk; None where it cannot
        be answered."""
        plan = self.would_reuse(wanted)
        return max(plan.tokens, *(known.tokens for known, _ in self._stored(wanted.key)[0]), 0) if plan else None

    def saved(self) -> int:
        """Tokens of the state that are on disk."""
        return self._store.covered(np.array(self.session.tokens, np.uint32)) if self._store else 0

    def begin(self, wish: Wish, disk: bool = True, others: Others = dict) -> Pieces[Start]:
        """Bring the session to the longest beginning of the request that can be had: from disk only with `disk`, from
        other slots by their numbers. Raises BadRequest when the request goes on from a state that is gone."""
        self._restored = ""
        yield from self._saved()
        stored, rejected = self._stored(wish.wanted.key) if disk else ([], ())
        live = self._live()
        decision = decide(wish.wanted, live, [known for known, _ in stored],
                          [other.offered(resting=resting) for other, resting in others().values()])
        if not decision.plans:
            told = explain(decision, wish.wanted, live, wish.origins)
            wish.declined(Start("none", 0, list(wish.wanted.ids), told, slot=self.number))
            raise tool_state_gone(wish.wanted.results)
        files = {known.name: candidate for known, candidate in stored}
        plan, rest = yield from self._first_reached(decision, files, wish, others)
        went = _as_it_went(decision, plan)
        saved = (yield from self._alike(wish)) if plan.replaces_live and len(rest) > GAIN else {}
        explanation = explain(went, wish.wanted, live, wish.origins, saved)
        beside = went.beside.live.tokens if went.beside else live.tokens
        mismatch = first_mismatch(beside, wish.wanted.ids, went.common_tokens) if beside else ()
        self._asked_at = plan.tokens
        if self._store is not None and not plan.replaces_live:
            self._store.continued(self.number)
        return Start(plan.source, plan.tokens, rest, explanation, self._restored, rejected, mismatch, self.number,
                     plan.donor)

    def _first_reached(self, decision: Decision, files: dict[str, Candidate], wish: Wish,
                       others: Others) -> Pieces[tuple[Plan, list[int]]]:
        """The first plan that works out, with the tokens that follow."""
        for plan in decision.plans:
            try:
                if plan.stored:
                    rest = yield from self._restore(plan, files[plan.stored.name], wish)
                elif plan.donor is not None:
                    rest = yield from self._branch(plan, wish, others)
                else:
                    rest = yield from self._go_back(plan, wish)
            except ValueError as fault:   # of what follows, see `_rest`
                log.warning("cannot go on from %s at %d tokens: %s", plan.source, plan.tokens, fault)
                continue
            if rest is not None:
                return plan, rest
        raise tool_state_gone(wish.wanted.results)   # a cold start works out always

    def _stored(self, key: bytes) -> tuple[list[tuple[Stored, Candidate]], tuple[tuple[str, str], ...]]:
        """States on disk that the prompt may go on from; (file, why) of those that it may not."""
        if self._store is None:
            return [], ()
        found = self._store.find(key)
        return [(Stored(c.name, c.tokens, c.text_bytes), c) for c in found.candidates], found.rejected

    def _alike(self, wish: Wish) -> Pieces[dict[str, bytes]]:
        """What the request is compared with on disk: file -> key."""
        if self._store is None:
            return {}
        comparing = self._store.start_comparing(wish.wanted.key)
        while not comparing.done():
            yield False
        return comparing.result()

    def _live(self, *, whole: bool = False) -> Live:
        """whole: the present length is a place to go back to as well."""
        tokens = list(self.session.tokens)      # a copy: what a rewind drops is still to be explained
        if not tokens:
            return Live()
        key = self._key.of(tokens)
        points = [RewindPoint(at, self._point_key(at)) for at in self.session.marks if at < len(tokens)]
        points += [RewindPoint(len(tokens), len(key))] if whole else []
        return Live(tokens, key, self._visible, tuple(points), self._call_ids, self._calls_at)

    def _point_key(self, at: int) -> int:
        if at not in self._point_keys:
            self._point_keys[at] = len(self._tokenizer.key_bytes_of_ids(self.session.tokens[:at]))
        return self._point_keys[at]

    def _go_back(self, plan: Plan, wish: Wish) -> Pieces[list[int] | None]:
        """To a length of the session itself. Returns the tokens that follow, None where that did not work out."""
        rest = self._rest(plan, wish, self.session.tokens)
        lost = len(self.session.tokens) - plan.tokens
        if lost > GAIN or plan.source == "none":   # another conversation's, as likely as not
            yield from self._evicted(wish)
        if lost > 0:
            reached = self.session.rewind(plan.tokens)
            self._forget_after(reached)
            return rest if reached == plan.tokens else None
        return rest

    def _branch(self, plan: Plan, wish: Wish, others: Others) -> Pieces[list[int] | None]:
        """To a length of another slot's session, whose rows are then shared."""
        yield from self._evicted(wish)
        donor, resting = others().get(plan.donor, (self, True))
        if donor is self or branch(wish.wanted, donor.offered(resting=resting, at=plan.tokens)) != plan:
            return None     # it went elsewhere while this slot's state was saved
        rest = self._rest(plan, wish, donor.session.tokens)
        reached = self.session.branch(donor.session, plan.tokens)
        assert reached == plan.tokens, f"branched at {reached} tokens, {plan.tokens} are a place to go back to"
        self._forget_after(0)
        self._visible = still_bound(donor._visible, reached)
        self._blocks = {block: at for block, at in donor._blocks.items() if at <= reached}
        return rest

    def _restore(self, plan: Plan, candidate: Candidate, wish: Wish) -> Pieces[list[int] | None]:
        """From disk; what was live is saved first, when it is known that the file can take its place."""
        self._store.pin(candidate.name)
        loading = self._store.start_loading(candidate, wish.wanted.key, self.number)
        try:
            while not loading.done():
                yield False
            restored = loading.result()
        except (CheckpointError, MemoryError) as fault:
            log.info("kv cache file not used: %s", fault)
            return None
        finally:
            self._store.release(candidate.name)
        rest = self._rest(plan, wish, restored.tokens.tolist())
        yield from self._evicted(wish)
        self._restored = candidate.name
        try:
            self.session.restore(restored.arrays)
        except CheckpointError as fault:   # the session stays as it was
            self.spoiled(str(fault))
            return None
        self._forget_after(0)
        self._blocks = dict.fromkeys(restored.head.tool_map, candidate.tokens)
        return rest

    def _evicted(self, wish: Wish) -> Pieces[None]:
        """Hand the state that is about to go to the writer."""
        if self.start_saving("evict"):
            wish.saves("evict", len(self.session.tokens))
        yield from self._saved()

    def _saved(self) -> Pieces[None]:
        while self.saving:
            yield self.go_on_saving()

    def _rest(self, plan: Plan, wish: Wish, held: Sequence[int]) -> list[int]:
        """The tokens that follow a plan's in a session that holds `held`. Raises ValueError for a place inside a
        character of a repeated token, and where the state's words, which may be more than the client's, do not fit."""
        ids, self._said_as = wish.wanted.ids, None
        if plan.then == "results":         # all that the request holds is one user turn, behind its instructions
            return self._live_tail(ids, held)
        if plan.then == "ids" or plan.stored and list(ids[:plan.tokens]) == list(held):
            return list(ids[plan.tokens:])
        rest = wish.after_key(plan.key_bytes)
        if (total := plan.tokens + len(rest)) >= self._context:
            raise ValueError(f"{total} tokens with what the client left out, and the context is {self._context}")
        self._said_as = wish.wanted
        return rest

    def _live_tail(self, ids: Sequence[int], held: Sequence[int]) -> list[int]:
        """What follows a state that waits for results, for a request of nothing else. Raises BadRequest when both
        together are too long, which nobody could know before the state was found."""
        ended = [] if held[-1] == self._tokenizer.eos else [self._tokenizer.eos]   # a cut answer lacks it
        tail = ended + list(ids[ids.index(self._tokenizer.control[USER]):])
        if (total := len(held) + len(tail)) >= self._context:
            raise BadRequest(f"prompt is {total} tokens with what came before, context size is {self._context} tokens: "
                             f"this server's maximum context length is {self._context} tokens; begin a shorter "
                             "conversation", param="input", code="context_length_exceeded",
                             details={"n_prompt_tokens": total, "n_ctx": self._context})
        return tail

    def _forget_after(self, length: int) -> None:
        self._point_keys = {at: key for at, key in self._point_keys.items() if at <= length}
        self._blocks = {block: at for block, at in self._blocks.items() if at <= length}
        self._visible = still_bound(self._visible, length)
        if self._calls_at > length:
            self._call_ids, self._calls_at = frozenset(), 0

    # ---- it goes on

    def stops(self, start: Start) -> dict[int, Reason | None]:
        """Where the prefill pauses, to leave a place to go back to, and to save for a reason."""
        anchor = self._chat_anchor(start)
        stops: dict[int, Reason | None] = {anchor: None} if anchor and anchor >= MIN_REWIND else {}
        if self._store is not None:
            parted = 0
            if anchor and start.reused < anchor and start.explanation.alike:
                ids = [*self.session.tokens, *start.rest][:anchor]
                parted = tokens_within(self._tokenizer, ids, start.explanation.alike)
            stops |= {boundary.tokens: boundary.reason for boundary in prefill_boundaries(
                self._rules, start.total, anchor, start.reused, self._chunk, parted)}
        return stops

    def _chat_anchor(self, start: Start) -> int | None:
        """The place of the last user turn before the first answer: what stands before it is stable."""
        user, assistant = (self._tokenizer.control[literal] for literal in (USER, ASSISTANT))
        ids = [*self.session.tokens, *start.rest]
        first = ids.index(assistant) if assistant in ids else len(ids)
        return next((i for i in range(first - 1, -1, -1) if ids[i] == user), None)

    def mark(self, left: Sequence[int] | None = None) -> None:
        """Leave a place to go back to. left: the tokens of the prompt that are still to come, None behind it."""
        self.session.mark()
        if self.session.tokens:   # spelled as the session grows, neither a lookup nor a save has to spell it all
            self._point_keys[len(self.session.tokens)] = len(self._key.of(self.session.tokens))
        wanted = self._said_as
        if left is None or wanted is None or wanted.api == "completions":
            return
        # What the session says here is not what the client says, so that its own key would not be found.
        come, length = self._tokenizer.key_bytes_of_ids(left), len(self.session.tokens)
        at = len(wanted.key) - len(come)
        if wanted.key.endswith(come) and clean_cut(wanted.key, at):
            here = VisibleKey(wanted.key[:at], VISIBLE[wanted.api], length)
            self._visible = (*(key for key in self._visible if key != here), here)

    def crossed(self, *, decoding: bool = True) -> bool:
        """Whether the session has grown past a place of a continued save since this was last so. Between two steps, a
        writer that is busy puts it off, and nothing is asked of the store: decoding must not wait for a disk."""
        if self._store is None or self.saving or decoding and not self._store.idle:
            return False
        before, self._asked_at = self._asked_at, len(self.session.tokens)
        return crosses(self._rules, before, self._asked_at)

    def sound(self) -> bool:
        """Whether the logits for the next token are numbers."""
        return bool(np.isfinite(self.session.logits()).all())

    def keep(self, length: int) -> list[int]:
        """Drop what an engine drafted behind `length` tokens and nobody took. Returns what is to be computed again."""
        if length >= len(self.session.tokens):
            return []
        self.finish_saving()    # which reads a state that nothing was taken from
        kept = list(self.session.tokens[:length])
        return kept[self.session.rewind(length):]

    def bind(self, visible: tuple[VisibleKey, ...], call_ids: frozenset[str], blocks: tuple[ToolBlock, ...]) -> None:
        """What the client may send back of the session as it is now, and the sampled calls in it."""
        length, marks = len(self.session.tokens), set(self.session.marks)
        # A key is as long as its conversation: those of lengths that cannot be gone back to would add up.
        self._visible = (*(key for key in self._visible if key.frontier in marks), *visible)
        self._call_ids, self._calls_at = call_ids, length
        self._blocks = dict.fromkeys(blocks, length) | self._blocks

    # ---- to disk

    @property
    def saving(self) -> bool:
        """Whether a save was begun that the writer has not got yet."""
        return self._export is not None or self._job is not None

    def save(self, reason: Reason) -> bool:
        """Hand the session as it is to the writer, unless it is not worth it; whether that was done. Raises nothing."""
        self.finish_saving()
        begun = self.start_saving(reason)
        self.finish_saving()
        return begun

    def start_saving(self, reason: Reason, blocks: tuple[ToolBlock, ...] = ()) -> bool:
        """Begin to hand over the session as it is, which `go_on_saving` does a piece at a time; whether that is worth
        it. Raises nothing."""
        self.finish_saving()
        n = len(self.session.tokens)
        if self._store is None or not n:
            return False
        try:
            tokens = np.array(self.session.tokens, np.uint32)
            visible = tuple((key.key, key.kind) for key in self._visible if key.frontier == n)
            if why := self._store.why_not_save(reason, tokens, [key for key, _ in visible]):
                log.debug("kv cache skipped tokens=%d because %s", n, why)
                return False
            self._export = Export(self.session.snapshot(), self._key.of(self.session.tokens), reason,
                                  self._store.missing_spans(tokens), visible,
                                  tuple(dict.fromkeys((*self._blocks, *blocks))))
        except Exception:  # whatever it was, no request may fail because it could not be saved
            log.exception("kv cache skipped tokens=%d because of a defect", n)
            return False
        return True

    def go_on_saving(self) -> bool:
        """The next piece of a save that was begun. False when all that is left is to wait for the writer."""
        if self._job is not None:
            return self._offer()
        export = self._export
        if export is None:
            return False
        try:
            if (job := export.step()) is not None:
                self._export, self._job = None, (job, time.monotonic() + WAIT_S.get(export.reason, 0.0))
                self._offer()
        except Exception:  # as above
            log.exception("kv cache skipped tokens=%d because of a defect", export.tokens)
            self._export = None
        return True

    def _offer(self) -> bool:
        """Whether the writer took the job, or its time is over."""
        job, until = self._job
        if not self._store.free and time.monotonic() < until:
            return False
        self._job = None
        self._store.save(job)
        return True

    def finish_saving(self) -> None:
        """All that is left of a save that was begun. Waits for the writer."""
        while self.saving:
            if not self.go_on_saving():
                time.sleep(POLL_S)

    def abandon_saving(self) -> None:
        """The session can no longer be read."""
        job, self._export, self._job = self._job, None, None
        if job is not None:
            self._store.save(job[0])

    @property
    def restored(self) -> str:
        """The file that the present request went on from, "" for none."""
        return self._restored

    def spoiled(self, why: str) -> None:
        """What came of the file could not be computed with: it is set aside."""
        self._store.quarantine(self._restored, why)
        self._restored = ""


def _as_it_went(decision: Decision, taken: Plan) -> Decision:
    """A decision without the plans that did not work out."""
    at = decision.plans.index(taken)
    if not at:
        return decision
    failed: dict[Source, Outcome] = {plan.source: "unreadable" if plan.stored else "unreachable"
                                     for plan in decision.plans[:at] if plan.source != taken.source}
    verdicts = [verdict for verdict in decision.verdicts if verdict.source not in (*failed, taken.source)]
    verdicts += [Verdict(source, outcome) for source, outcome in failed.items()]
    return replace(decision, plans=decision.plans[at:], verdicts=(*verdicts, Verdict(taken.source, "taken")))
