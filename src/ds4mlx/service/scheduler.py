"""The engine thread: a queue of requests, prefill in slices, decode, cancellation, and the live session they share.

The engine is opened, used and closed on this one thread. It holds one session, which keeps its state from request to
request: each prompt goes on from the longest prefix that is already there.
"""
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

from ds4mlx.engine.protocol import Engine, MemoryPlan, ModelInfo, Row, Sampling, Session, Step
from ds4mlx.errors import BadRequest, Cancelled
from ds4mlx.sessions.lookup import Source, reusable

log = logging.getLogger(__name__)

State = Literal["loading", "ok", "draining", "failed", "closed"]
SLOTS = 1
STUCK_S = 300.0  # an active request without a slice or step for so long means that the engine hangs


class Request(Protocol):
    """One prompt and its answer, as the engine thread sees them. All methods but `cancel` run on that thread."""
    prompt: Sequence[int]
    anchor: int                                   # length of the prompt without the header of its answer
    max_tokens: int

    def cancel(self, why: str) -> None: ...       # from any thread; the first reason stays
    def check(self) -> None: ...                  # raises Cancelled when given up on, or read too slowly
    def starts(self, source: Source, reused_tokens: int) -> None: ...
    def prefilled(self, tokens: int) -> None: ...  # prompt tokens in the session so far
    def sampling(self) -> Sampling: ...           # for the next step
    def accept(self, step: Step) -> bool: ...     # True: the answer is complete
    def finish(self, fault: Exception | None = None) -> None: ...  # the last call; must not raise with a fault


class Scheduler:
    """Serves requests one after the other, first come first served."""

    def __init__(self, open_engine: Callable[[], Engine], *, context: int, prefill_chunk: int = 2048,
                 max_queue: int = 0, power: int = 100) -> None:
        self.context, self.prefill_chunk, self.max_queue, self.power = context, prefill_chunk, max_queue, power
        self._open_engine = open_engine
        self._engine: Engine
        self.info: ModelInfo  # this and the plan: once it has started
        self.plan: MemoryPlan
        self._session: Session | None = None
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
            self._changed.notify_all()

    def cancel(self, request: Request, why: str) -> None:
        """Give a request up: at once when it is still queued, before the next slice or step when it runs."""
        request.cancel(why)
        with self._changed:
            if request not in self._queue:
                return
            self._queue.remove(request)
        request.finish(Cancelled(why))

    def close(self, drain_seconds: float) -> None:
        """Refuse what is queued, let the active request go on for up to `drain_seconds`, then stop. Blocks."""
        with self._changed:
            if self._state == "ok":
                self._state = "draining"
            refused, self._queue = list(self._queue), deque()
        for request in refused:
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
            self._session = self._engine.open(self.context)
        except Exception as fault:
            self._state = "failed"
            self._opened.set_exception(fault)
            return
        self._state = "ok"
        self._opened.set_result(self.info)
        while (request := self._next()) is not None:
            self._serve(request)
            with self._changed:
                self._active = None
                self._changed.notify_all()
        if self._session is not None:
            self._session.close()
        self._engine.close()

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
            self._prefill(request)
            self._decode(request)
            request.finish()
            return
        except Cancelled as given_up:
            fault = given_up
        except Exception as error:  # whatever happened, the next request finds a working engine
            log.exception("the engine failed; its session starts anew")
            self._drop_session()
            fault = error
        request.finish(fault)

    def _prefill(self, request: Request) -> None:
        """Bring the session to the end of the prompt, in slices that end at multiples of the chunk.

        The ends are absolute, so a prompt that goes on from a prefix is computed in the same pieces as a new one.
        """
        if self._session is None:
            self._session = self._engine.open(self.context)
        session, prompt = self._session, request.prompt
        reuse = reusable(session.tokens, prompt)
        done = reuse.tokens if reuse.source == "memory-token" else session.rewind(reuse.tokens)
        request.starts(reuse.source if done else "none", done)
        while done < len(prompt):
            self._check(request)
            end = min(done - done % self.prefill_chunk + self.prefill_chunk, len(prompt))
            if done < request.anchor < end:
                end = request.anchor
            with _Duty(self.power):
                self._engine.prefill(session, prompt[done:end])
            done = end
            request.prefilled(done)
            if done == request.anchor:
                session.mark()  # where the next turn goes on if its client sends the answer without its reasoning
        session.mark()          # and where another try at this answer goes on

    def _decode(self, request: Request) -> None:
        token: int | None = None
        generated: list[int] = []
        while len(generated) < request.max_tokens:
            self._check(request)
            with _Duty(self.power):
                steps, = self._engine.decode([Row(self._session, request.sampling(), token, generated)])
            for step in steps[:request.max_tokens - len(generated)]:
                token = step.token
                generated.append(token)
                if request.accept(step):
                    return

    def _check(self, request: Request) -> None:
        request.check()
        self._progress_at = time.monotonic()

    def _drop_session(self) -> None:
        """The state may be half written: close it, and open a new one with the next request."""
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close()
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
