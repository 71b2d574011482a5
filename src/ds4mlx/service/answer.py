"""An answer on its way: tokens of the engine thread become events for the task that reads them."""
import logging
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from ds4mlx.chat.events import (
    Event, Finish, FinishReason, Progress, Recovered, TextDelta, TokenLogprob, ToolBlockStart, Usage)
from ds4mlx.chat.messages import Effort
from ds4mlx.engine.protocol import Sampling, Step
from ds4mlx.errors import BadRequest, Cancelled, Ds4Error, DoesNotFit
from ds4mlx.service.mailbox import Mailbox
from ds4mlx.service.metrics import Ended, Metrics, Timings
from ds4mlx.service.progress import ProgressLog
from ds4mlx.service.requests import Known, Reused, Stage, reused
from ds4mlx.service.scheduler import Scheduler, refusal
from ds4mlx.service.slot import Ending, Start
from ds4mlx.service.trace import RequestTrace
from ds4mlx.service.turn import EncodedPrompt, Reading, Turn
from ds4mlx.sessions.header import Reason
from ds4mlx.sessions.lookup import Source
from ds4mlx.sessions.replay import ToolMemory
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.segments import Control
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger("ds4mlx.request")

CANCELLED = "cancelled"


class Answer:
    """Events of one turn, as an async iterator that ends after Finish. Closing it early cancels the request.

    To the scheduler it is a Request: the methods below the line run on the engine thread.
    """

    def __init__(self, turn: Turn, prompt: EncodedPrompt, max_tokens: int, *, tokenizer: Tokenizer,
                 scheduler: Scheduler, mailbox: Mailbox, stall_timeout_s: float, tool_memory: ToolMemory,
                 lowered_effort: Effort | None = None, trace: RequestTrace | None = None,
                 metrics: Metrics | None = None) -> None:
        self.turn, self.max_tokens, self.encoded = turn, max_tokens, prompt
        self.wanted, self.origins, self.thinking = prompt.wanted, prompt.origins, prompt.thinking
        self.header_tokens, self.prompt_tokens = prompt.header_tokens, len(prompt.wanted.ids)
        self.lowered_effort = lowered_effort  # what the effort became that the context has no room for
        self.source: Source = "none"
        self.cached_tokens = 0
        self.cache_line = ""                  # what was reused, and why no more
        self._reused: Reused | None = None
        self._slot: int | None = None
        self._trace, self._metrics = trace, metrics
        self._reached = 0                     # tokens of the prompt that are in the session
        self._reading = Reading(turn, prompt, tokenizer, tool_memory)
        self._tokenizer, self._scheduler, self._mailbox = tokenizer, scheduler, mailbox
        self._stall_timeout_s = stall_timeout_s
        self.hints = turn.conversation.ids
        self._why: str | None = None
        self._stalled_at: float | None = None
        self._timings = Timings()
        self._progress = ProgressLog(turn.request_id, scheduler.prefill_chunk)
        self._held_logprobs: list[TokenLogprob] = []
        self._ready: deque[Event] = deque()
        self._ended = False

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Event:
        if not self._ready:
            if self._ended:
                raise StopAsyncIteration
            self._ready = deque(await self.batch())
        return self._ready.popleft()

    async def batch(self) -> list[Event]:
        """The events since the last call, one at least; the last batch ends with Finish."""
        assert not self._ended, "the answer has ended"
        events = await self._mailbox.take()
        self._ended = isinstance(events[-1], Finish)
        return events

    async def aclose(self) -> None:
        """Give the answer up unless it has ended."""
        if not self._ended:
            self._ended = True
            self._scheduler.cancel(self, "cancelled")

    def cancel(self, why: str) -> None:
        self._why = self._why or why

    @property
    def given_up(self) -> bool:
        """Nobody waits for it any more; it ends with the slice or step that is being computed."""
        return self._why is not None

    @property
    def completion_tokens(self) -> int:
        """Sampled so far, the last EOS left out."""
        return self._reading.completion_tokens

    @property
    def place(self) -> int:
        """In the queue: 1 for the next one, 0 once it runs."""
        return self._scheduler.place(self) if self._timings.started is None else 0

    def known(self) -> Known:
        """What may be told of it now."""
        if self._timings.started is None:
            return self._known("waiting" if self.place else "beginning")
        return self._known("decoding" if self._reached == self.prompt_tokens else "prefilling")

    # ---- on the engine thread

    def check(self) -> None:
        if self._why is not None:
            raise Cancelled(self._why)

    def stalled(self) -> bool:
        """While its reader lags a whole mailbox behind; after the stall time-out it is given up."""
        if not self._mailbox.full:
            self._stalled_at = None
            return False
        now = time.monotonic()
        self._stalled_at = self._stalled_at or now
        if now - self._stalled_at > self._stall_timeout_s:
            self.cancel("slow_reader")
        return True

    def after_key(self, key_bytes: int) -> list[int]:
        return self.encoded.after_key(self._tokenizer, key_bytes)

    def starts(self, start: Start) -> None:
        self._timings.started = time.monotonic()
        self.source, self.cached_tokens, self.prompt_tokens = start.source, start.reused, start.total
        self.cache_line = start.explanation.header()
        self._reused, self._slot = reused(start.explanation), start.slot
        if self._trace:
            self._trace.starts(start)
        self._progress.begins(start.reused, start.total)
        self.prefilled(start.reused)

    def declined(self, start: Start) -> None:
        self.cache_line, self._reused = start.explanation.header(), reused(start.explanation)
        if self._trace:
            self._trace.starts(start)

    def prefilled(self, tokens: int) -> None:
        self._reached = tokens
        self._timings.prefilled = time.monotonic()
        self._progress.prefilled(tokens)
        self._mailbox.put([Progress(tokens, self.prompt_tokens)])

    @property
    def began(self) -> bool:
        return bool(self._timings.first_token)

    def interruptible(self) -> bool:
        return self._reading.interruptible

    def sampling(self) -> Sampling:
        return self._reading.sampling()

    def mask(self) -> np.ndarray | None:
        return self._reading.mask(self._scheduler.info.vocab)

    def accept(self, step: Step) -> bool:
        self._timings.first_token = self._timings.first_token or time.monotonic()
        reading, piece = self._reading, self._reading.piece(step.token)
        if self.turn.logprobs and isinstance(piece, bytes) and not reading.in_reasoning:
            self._held_logprobs.append(self._logprob(step))
        before = reading.completion_tokens
        events = reading.accept(step)
        if reading.completion_tokens > before:
            self._progress.said(reading.completion_tokens)
        if self._trace:
            self._trace.sampled(step.token, piece.literal.encode() if isinstance(piece, Control) else piece, events)
        self._mailbox.put(self._with_logprobs(events) if self._held_logprobs else events)
        return reading.done

    def finish(self, fault: Exception | None = None) -> None:
        """The only method that another thread may call, for a request that never ran."""
        self._timings.finished = time.monotonic()
        reading = self._reading
        usage = Usage(self.prompt_tokens, self.cached_tokens, reading.completion_tokens, reading.reasoning_tokens)
        last = self._with_logprobs(reading.close()) if fault is None else []
        end = reading.end(usage) if fault is None else _end_by_fault(fault, usage)
        self._log(end)
        if self._metrics:
            self._metrics.ended(self._counted(end), self._known("ended", _how(end)))
        if self._trace:
            self._trace.finishes(end, reading.said, self._timings)
        self._mailbox.put([*last, end], last=True)

    def ending(self) -> Ending:
        return self._reading.ending()

    def blocks_in(self, tokens: Sequence[int]) -> tuple[ToolBlock, ...]:
        return self._reading.blocks_in(tokens)

    def saves(self, reason: Reason, tokens: int) -> None:
        if self._trace:
            self._trace.happened(f"stored checkpoint reason={reason} tokens={tokens}")

    def _logprob(self, step: Step) -> TokenLogprob:
        spelled = self._reading.bytes_of
        top = tuple((token, spelled(token), logprob) for token, logprob in step.top)
        return TokenLogprob(step.token, spelled(step.token), step.logprob, top)

    def _with_logprobs(self, events: list[Event]) -> list[Event]:
        """Held log-probabilities go out ahead of their text; those of a tool block's opening go nowhere."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                result += self._held_logprobs
            if isinstance(event, TextDelta | ToolBlockStart):
                self._held_logprobs = []
            result.append(event)
        return result

    def _counted(self, end: Finish) -> Ended:
        recovered = sum(isinstance(event, Recovered) for event in self._reading.said)
        source = self.source if self._timings.started is not None else None
        return Ended(self.turn.api, _how(end), end.usage, self._timings, source,
                     max(0, self._reached - end.usage.cached_tokens), self.encoded.replays,
                     self._reused.disk_miss if self._reused else "", recovered)

    def _known(self, stage: Stage, finish: str = "") -> Known:
        timings = self._timings
        return Known(self.turn.request_id, self.turn.api, stage, self.place, self.prompt_tokens, self._reached,
                     self._reading.completion_tokens, self._slot, self._reused,
                     round(timings.prefill_tps(self._reached - self.cached_tokens), 1),
                     round(timings.decode_tps(self._reading.completion_tokens), 1), round(timings.total_s, 3), finish,
                     time.monotonic())

    def _log(self, end: Finish) -> None:
        """Numbers only: neither prompts nor answers belong in a log."""
        usage, timings, conversation = end.usage, self._timings, self.turn.conversation
        computed = usage.prompt_tokens - usage.cached_tokens
        log.info("%(api)s ctx=%(cached_tokens)d..%(prompt_tokens)d:%(computed_tokens)d tools=%(tools)d %(thinking)s "
                 "gen=%(generated_tokens)d finish=%(finish)s %(seconds).1fs prefill=%(prefill_tps).1f t/s "
                 "decode=%(decode_tps).1f t/s src=%(source)s %(request)s", {
                     "request": self.turn.request_id, "api": self.turn.api, "cached_tokens": usage.cached_tokens,
                     "prompt_tokens": usage.prompt_tokens, "computed_tokens": computed,
                     "generated_tokens": usage.completion_tokens, "tools": len(conversation.tools),
                     "thinking": f"think={conversation.effort}" if self.thinking else "nothink",
                     "finish": end.error_code or end.reason, "seconds": round(timings.total_s, 3),
                     "prefill_tps": round(timings.prefill_tps(computed), 1),
                     "decode_tps": round(timings.decode_tps(usage.completion_tokens), 1), "source": self.source})


def _how(end: Finish) -> FinishReason:
    return "cancelled" if end.error_code == CANCELLED else end.reason


def _end_by_fault(fault: Exception, usage: Usage) -> Finish:
    if isinstance(fault, Cancelled):
        match str(fault):
            case "shutting_down":
                fault = refusal("closed")
            case "cancelled_by_id":
                fault = BadRequest("the answer was given up: its request was cancelled by id", code=CANCELLED)
            case "slow_reader":  # it may still read on, and must not take what it has for the whole answer
                fault = BadRequest("the answer was given up: it was read too slowly; read faster or raise "
                                   "--send-stall-timeout", code="slow_reader", status=408)
            case _:
                return Finish("cancelled", usage)
    if isinstance(fault, DoesNotFit | MemoryError):
        return Finish("error", usage, error=f"out of memory: {fault}", error_code="out_of_memory")
    if isinstance(fault, BadRequest):
        return Finish("error", usage, error=str(fault), error_code=fault.code)
    message = str(fault) if isinstance(fault, Ds4Error) else "the engine failed; see the server's log"
    return Finish("error", usage, error=message, error_code="internal_error")
