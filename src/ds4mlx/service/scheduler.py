"""The engine thread: a queue of requests, and the slots that they are answered in, many at a time.

The engine is opened, used and closed on this one thread. In each round all slots that decode take one step together,
then one slot takes a slice of its prompt, then one piece of a state goes on its way to disk: whoever decodes waits for
no more than that. Slots keep their states from request to request.
"""
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Literal, TypeVar

from ds4mlx.engine.protocol import Engine, MemoryPlan, MemoryUse, ModelInfo, Row, Sampling, Step
from ds4mlx.errors import BadRequest, Cancelled
from ds4mlx.service.choice import Seat, choose
from ds4mlx.service.metrics import SlotUse
from ds4mlx.service.run import Phase, Request, Run
from ds4mlx.service.slot import POLL_S, Slot
from ds4mlx.service.watchdog import Watchdog
from ds4mlx.sessions.lookup import common_prefix
from ds4mlx.sessions.policy import GAIN, SaveRules
from ds4mlx.sessions.store import Store
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["loading", "ok", "draining", "failed", "closed"]
TURN_TOKENS = 4096  # of one prompt, before another one's turn comes
FINISHED: tuple[Phase, ...] = ("settling", "saving", "over")    # the answer is out
STUCK_S = 300.0  # an active request without a slice or step for so long means that the engine hangs


class Scheduler:
    """Serves requests in `slots` slots, first come first served."""

    def __init__(self, open_engine: Callable[[], Engine], tokenizer: Tokenizer, *, context: int, slots: int = 1,
                 prefill_chunk: int = 2048, quantum: int = 128, max_queue: int = 0, power: int = 100,
                 open_store: Callable[[Engine, int], Store | None] = lambda engine, context: None) -> None:
        """quantum: prompt tokens that are computed between two steps of others. open_store: the states on disk for
        this engine and context, None without."""
        self.context, self.prefill_chunk, self.max_queue, self.power = context, prefill_chunk, max_queue, power
        self.quantum = quantum
        self._open_engine, self._open_store, self._tokenizer = open_engine, open_store, tokenizer
        self.store: Store | None = None
        self.told: Callable[[str], None] = lambda event: None  # of what belongs to no request, on the engine thread
        self._engine: Engine
        self.info: ModelInfo  # this and the plan: once it has started
        self.plan: MemoryPlan
        self.slots: list[Slot | None] = [None] * slots  # None: to be opened when it is needed. Of the engine thread
        self._runs: list[Run] = []                  # in the order they were admitted
        self._turn: Run | None = None               # whose prompt is being computed
        self._turn_tokens = 0                       # of it, since its turn came
        self._protected: dict[Request, int] = {}    # numbers that keep what a request may go on from
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._state: State = "loading"
        self._progress_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watchdog = Watchdog(self._thread, lambda: self.state == "failed", self._refuse_waiting)
        self._opened: Future[ModelInfo] = Future()

    # ---- from other threads

    def start(self) -> ModelInfo:
        """Open the engine and compute one step with it. Blocks; raises what the engine raised."""
        self._thread.start()
        info = self._opened.result()
        self._watchdog.start()
        return info

    def submit(self, request: Request) -> None:
        """Queue a request. Raises BadRequest: 429 when the queue is full, 503 when the engine takes no more."""
        with self._changed:
            if (state := self.state) != "ok":
                raise refusal(state)
            waiting = len(self._queue) + 1 - (len(self.slots) - len(self._busy()))
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
        """Refuse what is queued, let active requests go on for up to `drain_seconds`, then stop. Blocks."""
        with self._changed:
            if self._state == "ok":
                self._state = "draining"
        self._refuse_waiting()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._runs, drain_seconds):
                for run in self._runs:
                    run.request.cancel("shutting_down")
            self._state = "closed"
            self._changed.notify_all()
        self._watchdog.close()
        if self._thread.ident is not None:
            self._thread.join(max(drain_seconds, 10.0))

    @property
    def memory(self) -> MemoryUse | None:
        """What the engine's arrays take; None unless it is open."""
        return self._engine.memory() if self._state in ("ok", "draining") else None

    @property
    def queued(self) -> int:
        return len(self._queue)

    def place(self, request: Request) -> int:
        """Its place in the queue: 1 for the next one, 0 for one that does not wait."""
        with self._changed:
            return self._queue.index(request) + 1 if request in self._queue else 0

    @property
    def active(self) -> int:
        return len(self._runs)

    @property
    def requests(self) -> list[Request]:
        """Those that run, then those that wait, in their order."""
        with self._changed:
            return [*(run.request for run in self._runs if run.phase not in FINISHED), *self._queue]

    @property
    def use(self) -> tuple[SlotUse, ...]:
        """What each slot is doing at this moment."""
        with self._changed:
            phases = {run.slot.number: run.phase for run in self._runs}
        return tuple(SlotUse(number, len(slot.session.tokens) if slot else 0, phases.get(number, "idle"))
                     for number, slot in enumerate(self.slots))

    @property
    def state(self) -> State:
        stuck = bool(self._runs) and time.monotonic() - self._progress_at > STUCK_S
        return "failed" if stuck or (self._state == "ok" and not self._thread.is_alive()) else self._state

    def _refuse_waiting(self) -> None:
        with self._changed:
            refused, self._queue = list(self._queue), deque()
        for request in refused:
            self._unprotect(request)
            request.finish(refusal(self.state))

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            self._engine = self._open_engine()
            if self.context > self._engine.info.context:
                self.context = self._engine.info.context
                log.warning("the context is %d tokens: the model was made for no more", self.context)
            self.info, self.plan = self._engine.info, self._engine.plan(self.context, len(self.slots))
            _warm_up(self._engine)
            self.store = self._open_store(self._engine, self.context)
            self.slots = [self._new_slot(number) for number in range(len(self.slots))]
        except Exception as fault:
            self._state = "failed"
            self._opened.set_exception(fault)
            return
        with self._changed:
            if self._state == "loading":    # not closed meanwhile
                self._state = "ok"
        self._opened.set_result(self.info)
        try:
            while self._wait_for_work():
                self._round()
        except Exception as fault:  # of the scheduler itself: nobody must wait for a thread that has ended
            log.exception("the engine thread has failed; restart the server")
            self._state = "failed"
            self._refuse_waiting()
            for run in list(self._runs):
                self._give_up(run, fault)
            self._retire()
            return
        self._shut_down()

    def _shut_down(self) -> None:
        slots = [slot for slot in self.slots if slot is not None]
        for slot in slots:
            if slot.save("shutdown"):
                self.told(f"stored checkpoint reason=shutdown tokens={len(slot.session.tokens)} slot={slot.number}")
        for slot in slots:
            self._drop(slot)
        if self.store is not None:
            self.store.close()
        self._engine.close()

    def _new_slot(self, number: int) -> Slot:
        rules = self.store.options.rules if self.store is not None else SaveRules()
        return Slot(self._engine, self._tokenizer, self.context, self.store, rules, self.prefill_chunk, number)

    def _unprotect(self, request: Request) -> None:
        number = self._protected.pop(request, None)
        if number is not None:
            self.store.unprotect(number)

    def _wait_for_work(self) -> bool:
        """False when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._runs or self._state == "closed")
            self._progress_at = time.monotonic()
            return bool(self._queue or self._runs)

    def _round(self) -> None:
        for run in [run for run in self._runs if run.phase not in FINISHED]:
            self._attempt(run, run.request.check)
        self._retire()
        self._admit()
        live = self._decode()
        worked = self._begin() or live
        worked = self._slice(self.quantum if live else None) or worked
        worked = self._save() or worked
        self._retire()
        if not worked and self._runs:
            time.sleep(POLL_S)

    # ---- a round's parts; each says whether anything was done

    def _admit(self) -> None:
        """Give slots to those that wait, in their order. A slot whose state is being brought to the end of an answer
        holds all of them up for a slice or two: its client's next request is likely to be the first."""
        while not any(run.phase == "settling" for run in self._runs):
            with self._changed:
                idle = [n for n in range(len(self.slots)) if n not in self._busy()]
                if not self._queue or not idle:
                    return
                request = self._queue[0]
            try:
                self._admitted(request, self._run_for(request, idle))
            except Exception as fault:
                if self._admitted(request, None):
                    log.exception("no slot could be given to a request")
                    self._unprotect(request)
                    request.finish(fault)

    def _run_for(self, request: Request, idle: Sequence[int]) -> Run:
        """Takes one of the idle slots."""
        number = self._chosen(request, idle)
        slot = self.slots[number] = self.slots[number] or self._new_slot(number)
        slot.used_at, slot.hints = time.monotonic(), request.hints
        run = Run(request, slot, self._engine, lambda: self._others(number), chunk=self.prefill_chunk,
                  context=self.context)
        self._let_follow(run)
        return run

    def _let_follow(self, run: Run) -> None:
        """Agents send several requests that begin alike at once: what one of them is about to compute, the later ones
        wait for and share, instead of computing it as well."""
        run.follow(None)
        wanted, earlier = run.request.wanted, takewhile(lambda other: other is not run, self._runs)
        leaders = [(common_prefix(other.request.wanted.ids, wanted.ids), other) for other in earlier
                   if other.phase in ("beginning", "prefilling")]
        common, leader = max(leaders, key=lambda pair: pair[0], default=(0, run))
        own = run.slot.would_have(wanted) if common >= GAIN else None
        if own is not None and common >= own + GAIN:
            run.follow(leader, common)

    def _admitted(self, request: Request, run: Run | None) -> bool:
        """Takes a request off the queue. False for one that was cancelled there meanwhile."""
        with self._changed:
            if waited := request in self._queue:
                self._queue.remove(request)
                self._runs += [run] if run else []
            return waited

    def _busy(self) -> set[int]:
        return {run.slot.number for run in self._runs if run.phase not in ("saving", "over")}

    def _chosen(self, request: Request, idle: Sequence[int]) -> int:
        if len(idle) == 1:
            return idle[0]
        seats = [self._seat(number, request) for number in idle]
        return choose(seats, len(request.wanted.ids), time.monotonic(), lambda number: self.slots[number].saved())

    def _seat(self, number: int, request: Request) -> Seat:
        slot = self.slots[number]
        if slot is None or not slot.session.tokens:
            return Seat(number, used_at=slot.used_at if slot else 0.0)
        plan = slot.would_reuse(request.wanted)
        return Seat(number, len(slot.session.tokens), plan.tokens if plan else 0, plan is not None and plan.whole,
                    bool(request.hints) and request.hints == slot.hints, slot.used_at)

    def _others(self, me: int) -> dict[int, tuple[Slot, bool]]:
        busy = self._busy()
        return {slot.number: (slot, slot.number not in busy) for slot in self.slots
                if slot is not None and slot.number != me and slot.session.tokens}

    def _decode(self) -> bool:
        """One step for all that decode."""
        rows: list[tuple[Run, Row]] = []
        for run in [run for run in self._runs if run.phase == "decoding" and not run.request.stalled()]:
            if (row := self._attempt(run, run.row)) is not None:
                rows.append((run, row))
        if not rows:
            return False
        with _Duty(self.power):
            results = self._step(rows)
        for (run, _), steps in zip(rows, results, strict=True):
            if steps is not None:
                self._attempt(run, lambda: run.take(steps))
        return True

    def _step(self, rows: Sequence[tuple[Run, Row]]) -> Sequence[list[Step] | None]:
        """A step that fails has advanced nobody: then each row takes it alone, and only who fails alone is given up."""
        if len(rows) > 1:
            try:
                return self._engine.decode([row for _, row in rows])
            except Exception as fault:
                log.warning("a step of %d rows failed, trying each alone: %s", len(rows), fault)
        return [self._attempt(run, lambda: self._engine.decode([row])[0]) for run, row in rows]

    def _begin(self) -> bool:
        """A piece of the oldest search for a beginning that need not wait."""
        beginning = [run for run in self._runs if run.phase == "beginning"]
        for run in beginning:
            if run.forsaken:
                self._attempt(run, lambda: self._let_follow(run))
        return any(self._attempt(run, run.begin) is not False for run in beginning
                   if run.phase == "beginning" and run.may_begin)

    def _slice(self, quantum: int | None) -> bool:
        """A slice of one prompt, or of what an answer needs to be kept."""
        with _Duty(self.power):
            if settling := next((run for run in self._runs if run.phase == "settling"), None):
                self._attempt(settling, lambda: settling.settle(self.quantum))
                return True
            run = self._next_prefill()
            if run is not None:
                self._turn_tokens += self._attempt(run, lambda: run.prefill(quantum)) or 0
            return run is not None

    def _next_prefill(self) -> Run | None:
        """The oldest one; several take turns."""
        ready = [run for run in self._runs if run.phase == "prefilling" and not run.waits_for_save
                 and not run.request.stalled()]
        if self._turn not in ready or self._turn_tokens >= TURN_TOKENS:
            at = self._runs.index(self._turn) if self._turn in self._runs else -1
            later = [run for run in ready if self._runs.index(run) > at]
            self._turn, self._turn_tokens = next(iter(later or ready), None), 0
        return self._turn

    def _save(self) -> bool:
        """A piece of one state on its way to disk."""
        return any(slot.go_on_saving() for slot in filter(None, self.slots) if slot.saving)

    # ---- what ends a run

    def _attempt(self, run: Run, work: Callable[[], T]) -> T | None:
        """What `work` gives; None when the run has ended by it, or begins again."""
        try:
            return work()
        except (Cancelled, BadRequest) as fault:
            self._give_up(run, fault)
        except Exception as fault:  # whatever happened, all other requests find a working engine
            self._failed(run, fault)
        return None

    def _give_up(self, run: Run, fault: Exception) -> None:
        finished = run.phase in FINISHED
        run.end()
        if not finished:
            run.request.finish(fault)

    def _failed(self, run: Run, fault: Exception) -> None:
        """The state may be half written: it goes. One that came from disk is set aside, and the request begins again:
        with the next one, then with none."""
        slot, again = run.slot, run.slot.restored and not run.request.began and run.phase != "settling"
        if again:
            log.warning("a saved state failed, beginning again without it: %s", fault)
            slot.spoiled("the engine failed on it")
        elif run.phase == "settling":
            log.error("the end of an answer could not be kept; the next turn computes more", exc_info=fault)
        else:
            log.error("the engine failed; the session starts anew", exc_info=fault)
        self._drop(slot)
        if again:
            try:
                slot = self.slots[slot.number] = self._new_slot(slot.number)
                slot.used_at, slot.hints = time.monotonic(), run.request.hints
                run.begin_again(slot)
                return
            except Exception as further:
                fault = further
        self._give_up(run, fault)

    def _drop(self, slot: Slot) -> None:
        """Close a slot; a new one is opened with its next request."""
        self.slots[slot.number] = None
        slot.abandon_saving()
        try:
            slot.session.close()
        except Exception:
            log.exception("the session of slot %d could not be closed", slot.number)

    def _retire(self) -> None:
        """Forget the runs that are over."""
        for run in self._runs:
            if run.phase == "saving" and not run.slot.saving:
                run.end()
        over = [run for run in self._runs if run.phase == "over"]
        for run in over:
            run.slot.used_at = time.monotonic()
            self._unprotect(run.request)
        if over:
            with self._changed:
                self._runs = [run for run in self._runs if run not in over]
                self._changed.notify_all()


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
        return BadRequest("the engine has failed, or has made no progress for minutes; see the server's log and restart"
                          " it", code="failed", status=503)
    return BadRequest("the server is shutting down; send the request again when it is back",
                      code="shutting_down", status=503)
