"""The engine thread: a queue of requests, prefill in slices, decode, cancellation, and the slot they share.

The engine is opened, used and closed on this one thread. Its slot keeps a state from request to request, and saves it
to disk where that is worth it: each prompt goes on from the longest beginning that is already there.
"""
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

import numpy as np

from ds4mlx.engine.protocol import Engine, MemoryPlan, ModelInfo, Row, Sampling, Step
from ds4mlx.errors import BadRequest, Cancelled
from ds4mlx.service.slot import Ending, Slot, Start
from ds4mlx.sessions.explain import Origin
from ds4mlx.sessions.header import Reason
from ds4mlx.sessions.lookup import Wanted
from ds4mlx.sessions.policy import SaveRules
from ds4mlx.sessions.store import Store
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

State = Literal["loading", "ok", "draining", "failed", "closed"]
SLOTS = 1
MARK_EVERY = 2048  # tokens of a prompt between places to go back to
STUCK_S = 300.0  # an active request without a slice or step for so long means that the engine hangs


class Request(Protocol):
    """One prompt and its answer, as the engine thread sees them. All methods but `cancel` run on that thread."""
    wanted: Wanted
    origins: Sequence[Origin]
    header_tokens: int                            # that open its answer, at the end of the prompt
    max_tokens: int

    def after_key(self, key_bytes: int) -> list[int]: ...

    def cancel(self, why: str) -> None: ...       # from any thread; the first reason stays
    began: bool                                   # something of its answer has been sent
    def check(self) -> None: ...                  # raises Cancelled when given up on, or read too slowly
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


class Scheduler:
    """Serves requests one after the other, first come first served."""

    def __init__(self, open_engine: Callable[[], Engine], tokenizer: Tokenizer, *, context: int,
                 prefill_chunk: int = 2048, max_queue: int = 0, power: int = 100,
                 open_store: Callable[[Engine, int], Store | None] = lambda engine, context: None) -> None:
        """open_store: the states on disk for this engine and context, None without."""
        self.context, self.prefill_chunk, self.max_queue, self.power = context, prefill_chunk, max_queue, power
        self._open_engine, self._open_store, self._tokenizer = open_engine, open_store, tokenizer
        self.store: Store | None = None
        self._engine: Engine
        self.info: ModelInfo  # this and the plan: once it has started
        self.plan: MemoryPlan
        self._slot: Slot | None = None
        self._protected: dict[Request, int] = {}   # numbers that keep what a request may go on from
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._active: Request | None = None
        self._state: State = "loading"
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._opened: Future[ModelInfo] = Future()

    # ---- from other threads

    def start(self) -> ModelInfo:
        """Open the engine and compute one step with it. Blocks; raises what the engine raised."""
        self._thread.start()
        return self._opened.result()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises BadRequest: 429 when the queue is full, 503 when the engine takes no more."""
        with self._changed:
            if self._state != "ok":
                raise refusal(self._state)
            waiting = len(self._queue) + (self._active is not None) - SLOTS + 1
            if self.max_queue and waiting > self.max_queue:
                raise BadRequest(f"{self.max_queue} requests are waiting already, which is the limit; "
                                 "try again in a few seconds", code="queue_full", status=429)
            self._queue.append(request)
            if self.store is not None:
                self._protected[request] = self.store.protect(request.wanted.key)
            self._changed.notify_all()

    def cancel(self, request: Request, why: str) -> None:
        """Give a request up: at once when it is still queued, before the next slice or step when it runs."""
        request.cancel(why)
        with self._changed:
            if request not in self._queue:
                return
            self._queue.remove(request)
        self._unprotect(request)
        request.finish(Cancelled(why))

    def close(self, drain_seconds: float) -> None:
        """Refuse what is queued, let the active request go on for up to `drain_seconds`, then stop. Blocks."""
        with self._changed:
            if self._state == "ok":
                self._state = "draining"
            refused, self._queue = list(self._queue), deque()
        for request in refused:
            self._unprotect(request)
            request.finish(refusal("draining"))
        with self._changed:
            if not self._changed.wait_for(lambda: self._active is None, drain_seconds):
                self._active.cancel("shutting_down")
            self._state = "closed"
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(max(drain_seconds, 10.0))

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def active(self) -> int:
        return int(self._active is not None)

    @property
    def state(self) -> State:
        stuck = self._active is not None and time.monotonic() - self._progress_at > STUCK_S
        return "failed" if stuck or (self._state == "ok" and not self._thread.is_alive()) else self._state

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            self._engine = self._open_engine()
            if self.context > self._engine.info.context:
                self.context = self._engine.info.context
                log.warning("the context is %d tokens: the model was made for no more", self.context)
            self.info, self.plan = self._engine.info, self._engine.plan(self.context, SLOTS)
            _warm_up(self._engine)
            self.store = self._open_store(self._engine, self.context)
            self._slot = self._new_slot()
        except Exception as fault:
            self._state = "failed"
            self._opened.set_exception(fault)
            return
        self._state = "ok"
        self._opened.set_result(self.info)
        while (request := self._next()) is not None:
            self._serve(request)
            self._unprotect(request)
            with self._changed:
                self._active = None
                self._changed.notify_all()
        self._shut_down()

    def _shut_down(self) -> None:
        if self._slot is not None:
            self._slot.save("shutdown")
            self._slot.session.close()
        if self.store is not None:
            self.store.close()
        self._engine.close()

    def _new_slot(self) -> Slot:
        rules = self.store.options.rules if self.store is not None else SaveRules()
        return Slot(self._engine, self._tokenizer, self.context, self.store, rules, self.prefill_chunk)

    def _unprotect(self, request: Request) -> None:
        number = self._protected.pop(request, None)
        if number is not None:
            self.store.unprotect(number)

    def _next(self) -> Request | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._state == "closed")
            if self._state == "closed":
                return None
            self._active = self._queue.popleft()
            self._progress_at = time.monotonic()
            return self._active

    def _serve(self, request: Request) -> None:
        fault: Exception
        try:
            start, generated = self._answer(request)
            request.finish()
            self._settle(request, start, generated)
            return
        except Cancelled as given_up:
            fault = given_up
        except BadRequest as refused:
            fault = refused
        except Exception as error:  # whatever happened, the next request finds a working engine
            log.exception("the engine failed; its session starts anew")
            self._drop_slot()
            fault = error
        request.finish(fault)

    def _answer(self, request: Request) -> tuple[Start, list[int]]:
        """Prefill and decode. A state from disk that cannot be computed with is set aside, and the request begins
        again: with the next one, then with none. Returns the sampled tokens, of which the session lacks the last."""
        for disk in (True, True, False):
            try:
                return self._try(request, disk)
            except (Cancelled, BadRequest):
                raise
            except Exception as fault:
                if self._slot is None or not self._slot.restored or request.began:
                    raise
                log.warning("a saved state failed, beginning again without it: %s", fault)
                self._slot.spoiled("the engine failed on it")
                self._drop_slot()
        raise AssertionError("without a saved state, its failure is the engine's")

    def _try(self, request: Request, disk: bool) -> tuple[Start, list[int]]:
        if self._slot is None:
            self._slot = self._new_slot()
        start = self._slot.begin(request, disk)
        request.starts(start)
        self._prefill(request, start)
        if start.file and not self._slot.sound():
            raise ArithmeticError("the logits are not finite")
        return start, self._decode(request, start)

    def _prefill(self, request: Request, start: Start) -> None:
        """Bring the session to the end of the prompt, in slices that end at multiples of the chunk.

        The ends are absolute, so a prompt that goes on from a prefix is computed in the same pieces as a new one.
        """
        slot, done, total = self._slot, start.reused, start.total
        header = total - request.header_tokens   # where the next turn goes on if its client sends no reasoning
        stops = {header: None} | slot.stops(start)
        while done < total:
            self._check(request)
            end = min(done - done % self.prefill_chunk + self.prefill_chunk, total)
            end = min([end, *(stop for stop in stops if done < stop < end)])
            with _Duty(self.power):
                self._engine.prefill(slot.session, start.rest[done - start.reused:end - start.reused])
            done = end
            request.prefilled(done)
            if done in stops or done % MARK_EVERY == 0:
                slot.mark(start.rest[done - start.reused:])
            if reason := stops.get(done):
                self._start_saving(request, reason)
                slot.finish_saving()
        slot.mark([])        # and where another try at this answer goes on

    def _decode(self, request: Request, start: Start) -> list[int]:
        generated: list[int] = []
        limit = min(request.max_tokens, self.context - start.total)
        while len(generated) < limit:
            self._check(request)
            with _Duty(self.power):
                steps, = self._engine.decode([Row(self._slot.session, request.sampling(),
                                                  generated[-1] if generated else None, generated, request.mask())])
            for step in steps[:limit - len(generated)]:
                generated.append(step.token)
                if request.accept(step):
                    return generated
            self._slot.go_on_saving()
            if request.interruptible() and self._slot.crossed():
                self._start_saving(request, "continued")
        return generated

    def _start_saving(self, request: Request, reason: Reason) -> None:
        tokens = self._slot.session.tokens
        if self._slot.start_saving(reason, request.blocks_in(tokens)):
            request.saves(reason, len(tokens))

    def _settle(self, request: Request, start: Start, generated: list[int]) -> None:
        """Bring the session to the end of the answer and bind what the client may send back of it."""
        slot = self._slot
        try:
            slot.keep(start.total + max(0, len(generated) - 1))
            ending = request.ending()
            if ending.closing is None or not generated:
                return
            rest = generated[-1:]
            rest += [] if not ending.closing or rest[-1] == ending.closing[-1] else ending.closing
            if len(slot.session.tokens) + len(rest) > self.context:
                return
            self._engine.prefill(slot.session, rest)
            slot.mark()
            slot.bind(ending.visible(len(slot.session.tokens)), ending.call_ids, request.blocks_in(slot.session.tokens))
            if slot.crossed(decoding=False):
                slot.save("continued")
        except Exception:
            log.exception("the end of an answer could not be kept; the next turn computes more")
            self._drop_slot()

    def _check(self, request: Request) -> None:
        request.check()
        self._progress_at = time.monotonic()

    def _drop_slot(self) -> None:
        """The state may be half written: close it, and open a new one with the next request."""
        slot, self._slot = self._slot, None
        try:
            if slot is not None:
                slot.session.close()
        except Exception:
            log.exception("closing the failed session failed as well")


class _Duty:
    """Sleeps after a piece of work so that work takes `power` percent of the time."""

    def __init__(self, power: int) -> None:
        self.power = power

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self.power < 100:
            time.sleep((time.monotonic() - self.began) * (100 / self.power - 1))


def _warm_up(engine: Engine) -> None:
    """One token in, one out: kernels are compiled and faults of the model come up before anyone waits."""
    session = engine.open(128)
    engine.prefill(session, [0])
    engine.decode([Row(session, Sampling(temperature=0.0))])
    session.close()


def refusal(state: State) -> BadRequest:
    """Why a request is not taken in this state: 503."""
    if state == "loading":
        return BadRequest("the model is still loading; try again in a moment", code="loading", status=503)
    if state == "failed":
        return BadRequest("the engine has failed; see the server's log and restart it", code="failed", status=503)
    return BadRequest("the server is shutting down; send the request again when it is back",
                      code="shutting_down", status=503)
