"""One request in its slot: from finding its beginning, by prefill and decode, to the end of its answer in the session.

A run does one piece of work at a time, whenever the scheduler asks for one. What a piece raises is the scheduler's to
judge; the run stays where it was.
"""
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from ds4mlx.engine.protocol import Engine, Row, Sampling, Step
from ds4mlx.service.slot import Ending, Others, Pieces, Slot, Start
from ds4mlx.sessions.explain import Origin
from ds4mlx.sessions.header import Reason
from ds4mlx.sessions.lookup import Wanted
from ds4mlx.sessions.toolmap import ToolBlock

Phase = Literal["beginning", "prefilling", "decoding", "settling", "saving", "over"]
MARK_EVERY = 2048       # tokens of a prompt between places to go back to
DISK_TRIES = 2          # saved states that may fail before the prompt begins without any


class Request(Protocol):
    """One prompt and its answer, as the engine thread sees them. All methods but `cancel` run on that thread."""
    wanted: Wanted
    origins: Sequence[Origin]
    hints: tuple[str, ...]                        # by which its client tells conversations apart
    header_tokens: int                            # that open its answer, at the end of the prompt
    max_tokens: int

    def after_key(self, key_bytes: int) -> list[int]: ...

    def cancel(self, why: str) -> None: ...       # from any thread; the first reason stays
    began: bool                                   # something of its answer has been sent
    def check(self) -> None: ...                  # raises Cancelled when given up on
    def stalled(self) -> bool: ...                # its reader lags: nothing more is to be computed for it yet
    def declined(self, start: Start) -> None: ...  # its state is gone; `finish` follows
    def starts(self, start: Start) -> None: ...
    def prefilled(self, tokens: int) -> None: ...  # prompt tokens in the session so far
    def sampling(self) -> Sampling: ...           # for the next step
    def mask(self) -> np.ndarray | None: ...      # tokens allowed there, None: all
    def accept(self, step: Step) -> bool: ...     # True: the answer is complete
    def interruptible(self) -> bool: ...          # outside a tool block: its state may be saved
    def finish(self, fault: Exception | None = None) -> None: ...  # must not raise with a fault
    def ending(self) -> Ending: ...               # after `finish`: what its state needs to be found again
    def blocks_in(self, tokens: Sequence[int]) -> tuple[ToolBlock, ...]: ...  # of its history, to save with a state
    def saves(self, reason: Reason, tokens: int) -> None: ...     # a state of so many tokens goes to disk


class Run:
    """phase: beginning -> prefilling -> decoding -> settling -> over. A run is `saving` when all that is left is a
    save; its slot may have another run by then."""

    def __init__(self, request: Request, slot: Slot, engine: Engine, others: Others, *, chunk: int,
                 context: int) -> None:
        self.request, self.slot, self.phase = request, slot, "beginning"
        self._engine, self._others, self._chunk, self._context = engine, others, chunk, context
        self._leader: Run | None = None
        self._until = 0
        self._disk_tries = DISK_TRIES
        self._beginning: Pieces[Start] | None = None
        self._start: Start
        self._stops: dict[int, Reason | None] = {}
        self._done = 0                      # tokens of the prompt that are in the session
        self._generated: list[int] = []     # of which the session lacks the last
        self._limit = 0
        self._left: list[int] = []          # to be put behind the answer
        self._bound: Ending | None = None   # what the state is found by once they are

    phase: Phase

    # ---- beginning

    def follow(self, leader: "Run | None", until: int = 0) -> None:
        """Begin no sooner than the leader has computed so many tokens, which are to be shared; without one, at once."""
        self._leader, self._until = leader, until

    @property
    def may_begin(self) -> bool:
        return self._leader is None or self.forsaken or self._leader._done >= self._until

    @property
    def forsaken(self) -> bool:
        """Whether its leader ended before it had computed what it was followed for."""
        leader = self._leader
        return leader is not None and leader.phase not in ("beginning", "prefilling") and leader._done < self._until

    def begin(self) -> bool:
        """A piece of finding where the prompt begins. False when there was nothing to do but wait."""
        self._leader = None
        if self._beginning is None:
            self._beginning = self.slot.begin(self.request, self._disk_tries > 0, self._others)
        try:
            return next(self._beginning)
        except StopIteration as found:
            self._beginning = None
            self._begun(found.value)
            return True

    def begin_again(self, slot: Slot) -> None:
        """In a new slot, after the state that was read from disk has failed; the last time without the disk."""
        self._disk_tries -= 1
        self.slot, self.phase = slot, "beginning"
        self._leave_beginning()

    def _begun(self, start: Start) -> None:
        self._start, self._done = start, start.reused
        self._limit = min(self.request.max_tokens, self._context - start.total)
        self.request.starts(start)
        header = start.total - self.request.header_tokens   # where the next turn goes on if it comes without reasoning
        self._stops = {header: None} | self.slot.stops(start)
        self.phase = "prefilling"
        if self._done == start.total:
            self._prompt_is_in()

    # ---- prefill

    @property
    def waits_for_save(self) -> bool:
        """Whether a state on its way to disk has to be read before the prompt goes on."""
        return self.slot.saving

    def prefill(self, quantum: int | None) -> int:
        """The next slice of the prompt. Returns its tokens.

        It ends at a multiple of the chunk, and of `quantum`, where it has to leave room for others. The ends are
        absolute, so a prompt that goes on from a prefix is computed in the same pieces as a new one.
        """
        start, done, slot = self._start, self._done, self.slot
        ends = [done - done % step + step for step in (self._chunk, quantum) if step]
        end = min([start.total, *ends, *(stop for stop in self._stops if stop > done)])
        self._engine.prefill(slot.session, start.rest[done - start.reused:end - start.reused])
        self._done = end
        self.request.prefilled(end)
        if end in self._stops or end % MARK_EVERY == 0:
            slot.mark(start.rest[end - start.reused:])
        if reason := self._stops.get(end):
            self._start_saving(reason)
        if end == start.total:
            self._prompt_is_in()
        return end - done

    def _prompt_is_in(self) -> None:
        self.slot.mark([])      # where another try at this answer goes on
        if self._start.file and not self.slot.sound():
            raise ArithmeticError("the logits are not finite")
        self.phase = "decoding"
        if self._limit <= 0:
            self._complete()

    # ---- decode

    def row(self) -> Row:
        """Its part in the next step."""
        request, generated = self.request, self._generated
        return Row(self.slot.session, request.sampling(), generated[-1] if generated else None, generated,
                   request.mask())

    def take(self, steps: Sequence[Step]) -> None:
        """What the step gave."""
        for step in steps[:self._limit - len(self._generated)]:
            self._generated.append(step.token)
            if self.request.accept(step):
                self._complete()
                return
        if len(self._generated) >= self._limit:
            self._complete()
        elif self.request.interruptible() and self.slot.crossed():
            self._start_saving("continued")

    def _start_saving(self, reason: Reason) -> None:
        tokens = self.slot.session.tokens
        if self.slot.start_saving(reason, self.request.blocks_in(tokens)):
            self.request.saves(reason, len(tokens))

    # ---- the end

    def _complete(self) -> None:
        self.request.finish()
        self.phase = "settling"
        self._left = self.slot.keep(self._start.total + max(0, len(self._generated) - 1))
        ending = self.request.ending()
        if ending.closing is None or not self._generated:
            return
        rest = self._generated[-1:]
        rest += [] if not ending.closing or rest[-1] == ending.closing[-1] else ending.closing
        if len(self.slot.session.tokens) + len(self._left) + len(rest) <= self._context:
            self._left += rest
            self._bound = ending

    def settle(self, quantum: int) -> None:
        """Bring the session a slice further to the end of the answer, and bind what the client may send back of it."""
        slice_, self._left = self._left[:quantum], self._left[quantum:]
        if slice_:
            self._engine.prefill(self.slot.session, slice_)
        if self._left:
            return
        if self._bound:
            self._bind(self._bound)
        self.end()

    def _bind(self, ending: Ending) -> None:
        slot = self.slot
        slot.mark()
        tokens = slot.session.tokens
        slot.bind(ending.visible(len(tokens)), ending.call_ids, self.request.blocks_in(tokens))
        if slot.crossed(decoding=False):
            slot.start_saving("continued")

    def end(self) -> None:
        """Nothing more is computed; a save that was begun goes on."""
        self._leave_beginning()
        self.phase = "saving" if self.slot.saving else "over"

    def _leave_beginning(self) -> None:
        if self._beginning is not None:
            self._beginning.close()
            self._beginning = None
