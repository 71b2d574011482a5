"""One turn being answered: tokens of the engine thread become events for the task that reads them.

The parser runs on the engine thread, because what it has read decides how the next token may be sampled: tags of a tool
block greedily, and no end of the answer inside one.
"""
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds4mlx.chat.dialects.prompt import Replay
from ds4mlx.chat.events import (
    Event, Finish, FinishReason, Progress, Recovered, TextDelta, TokenLogprob, ToolBlockStart, ToolCallEnd, ToolCallStart, Usage,
    gather)
from ds4mlx.chat.messages import Conversation, Effort, Message, Reasoning, TextPart, ToolCall
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.chat.syntax.base import Region
from ds4mlx.engine.protocol import Sampling, Step
from ds4mlx.errors import BadRequest, Cancelled, Ds4Error, DoesNotFit
from ds4mlx.service.constraint import Constraint
from ds4mlx.service.mailbox import Mailbox
from ds4mlx.service.metrics import Ended, Metrics, Timings
from ds4mlx.service.progress import ProgressLog
from ds4mlx.service.requests import Known, Reused, Stage, reused
from ds4mlx.service.scheduler import Scheduler, refusal
from ds4mlx.service.slot import Ending, Start
from ds4mlx.service.trace import RequestTrace
from ds4mlx.sessions.explain import Origin
from ds4mlx.sessions.header import Reason
from ds4mlx.sessions.lookup import VISIBLE, Api, Source, VisibleKey, Wanted
from ds4mlx.sessions.replay import Replays, ToolMemory, cut_block, new_call_id
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.keys import after_key
from ds4mlx.text.segments import DSML, EOS, THINK_CLOSE, Control, Segment
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger("ds4mlx.request")

GREEDY_REGIONS = (Region.STRUCTURE, Region.JSON_STRUCTURE)
MAX_MASKED_EOS = 24  # a model that wants to end inside a tool block so many times will not close it
CANCELLED = "cancelled"
REPLACEMENT = "\ufffd".encode()  # for an id of a padded vocabulary that spells nothing


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came, for a trace."""
    model: str
    stream: bool
    body: bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """What a server asks for. `param` is the body's field that holds the prompt, for errors about it."""
    conversation: Conversation
    sampling: Sampling
    max_tokens: int | None = None  # None: the server's limit
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    one_call: bool = False         # the answer ends after its first tool call
    most_reasoning: int | None = None   # tokens of reasoning after which it is closed; None: any number
    api: Api = "chat"
    param: str = "messages"
    request_id: str = ""
    received: Received | None = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A rendered conversation in ids, of which the last `header_tokens` open the answer, and what finds its states.

    thinking: the answer begins with reasoning. key_of_answer: the key of the conversation with an answer to it, as a
    client would send it back; None where no conversation was rendered.
    """
    wanted: Wanted
    segments: tuple[Segment, ...]
    header_tokens: int
    thinking: bool
    origins: tuple[Origin, ...] = ()
    key_of_answer: Callable[[Message, Replay | None, bool], bytes] | None = None
    replays: Replays = Replays()
    constraint: Constraint | None = None


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
        self._tool_memory, self._trace, self._metrics = tool_memory, trace, metrics
        self._reached = 0                     # tokens of the prompt that are in the session
        self._sampled: list[tuple[int, bytes | Control]] = []   # behind the reasoning
        self._said: list[Event] = []
        self._call_ids: list[str] = []
        self._tokenizer, self._scheduler, self._mailbox = tokenizer, scheduler, mailbox
        self._stall_timeout_s = stall_timeout_s
        tools = () if turn.conversation.tools_banned else tuple(tool.name for tool in turn.conversation.tools)
        self._stream = AnswerStream(thinking=prompt.thinking, tools=tools, stop=turn.stop,
                                    fits=prompt.constraint.fits if prompt.constraint else None)
        self._sampling = _Samplings(turn, tokenizer)
        self.hints = turn.conversation.ids
        self._why: str | None = None
        self._stalled_at: float | None = None
        self._called = False   # its one call is complete
        self._masking = False  # the present step may not sample EOS
        self._masked_eos = 0   # steps whose best token was a masked EOS
        self._timings = Timings()
        self._progress = ProgressLog(turn.request_id, scheduler.prefill_chunk)
        self._completion_tokens = self._reasoning_tokens = 0
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
        return self._completion_tokens

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
        return self._tokenizer.encode(after_key(self._tokenizer, self.encoded.segments, key_bytes))

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
        return self._stream.region is Region.OUTSIDE

    def sampling(self) -> Sampling:
        self._masking = self._stream.masks_eos and self._masked_eos < MAX_MASKED_EOS
        return self._sampling.of(greedy=self._stream.region in GREEDY_REGIONS, mask_eos=self._masking)

    def mask(self) -> np.ndarray | None:
        budget, constraint = self.turn.most_reasoning, self.encoded.constraint
        if self._stream.in_reasoning and budget is not None and self._reasoning_tokens >= budget:
            return np.arange(self._scheduler.info.vocab) == self._tokenizer.control[THINK_CLOSE]
        return None if constraint is None else constraint.mask(self._stream.in_reasoning)

    def accept(self, step: Step) -> bool:
        self._timings.first_token = self._timings.first_token or time.monotonic()
        if self._masking and step.top[0][0] == self._tokenizer.eos:
            self._masked_eos += 1
        literal = self._tokenizer.literal(step.token)
        if literal != EOS:
            self._completion_tokens += 1
            self._progress.said(self._completion_tokens)
            self._reasoning_tokens += self._stream.in_reasoning
        if self.turn.logprobs and literal is None and not self._stream.in_reasoning:
            self._held_logprobs.append(self._logprob(step))
        piece = self._bytes(step.token) if literal is None else Control(literal)
        if self.encoded.constraint is not None:
            self.encoded.constraint.accept(step.token, piece, self._stream.in_reasoning)
        if not self._stream.in_reasoning:
            self._sampled.append((step.token, piece))
        events: list[Event] = [self._named(event) for event in self._stream.push(piece)]
        self._said += events
        if self._trace:
            self._trace.sampled(step.token, piece.literal.encode() if isinstance(piece, Control) else piece, events)
        self._mailbox.put(self._with_logprobs(events) if self._held_logprobs else events)
        self._called = self.turn.one_call and any(isinstance(event, ToolCallEnd) for event in events)
        return self._stream.done or self._called

    def finish(self, fault: Exception | None = None) -> None:
        """The only method that another thread may call, for a request that never ran."""
        self._timings.finished = time.monotonic()
        usage = Usage(self.prompt_tokens, self.cached_tokens, self._completion_tokens, self._reasoning_tokens)
        last, end = self._ending(usage) if fault is None else ([], _end_by_fault(fault, usage))
        self._log(end)
        if self._metrics:
            self._metrics.ended(self._counted(end), self._known("ended", _how(end)))
        if self._trace:
            self._trace.finishes(end, self._said, self._timings)
        self._mailbox.put([*last, end], last=True)

    def _ending(self, usage: Usage) -> tuple[list[Event], Finish]:
        """What the parser still holds, and why the answer ends: by itself, after its one call, or at its limit."""
        stream = self._stream
        last = [] if stream.done else stream.finish("stop" if self._called else "length")
        self._said += last
        end = Finish(stream.finish_reason, usage, stream.stop_string, stream.error, stream.error_code)
        return self._with_logprobs(last), end

    def _named(self, event: Event) -> Event:
        """A call that starts gets the id that the client will come back with."""
        if not isinstance(event, ToolCallStart):
            return event
        self._call_ids.append(new_call_id("toolu_" if self.turn.api == "anthropic" else "call_"))
        return replace(event, id=self._call_ids[-1])

    def ending(self) -> Ending:
        stream = self._stream
        whole = stream.finish_reason == "stop" or stream.finish_reason == "tool_calls" and stream.exact_block
        cut = stream.finish_reason == "length" and stream.open_call is None
        if not stream.reasoning_closed or not (whole or cut) or self.encoded.key_of_answer is None:
            return Ending()
        replay = self._remember() if stream.finish_reason == "tool_calls" else None
        return Ending((self._tokenizer.eos,) if whole else (), lambda frontier: self._visible(replay, whole, frontier),
                      frozenset(self._call_ids))

    def _remember(self) -> Replay | None:
        """Keep the sampled block of calls, to be repeated token for token."""
        found = None if self._stream.implicit_close else cut_block(self._sampled)
        if found is None:
            return None
        lead, ids = found
        spelled = (piece.literal.encode() if isinstance(piece, Control) else piece
                   for _, piece in self._sampled[-len(ids):])
        text = b"".join(spelled).decode("utf-8", "replace")
        block = ToolBlock(tuple(self._call_ids), lead, text, ids)
        self._tool_memory.remember(block, gather(self._said).calls)
        return Replay(lead, ids, text)

    def _visible(self, replay: Replay | None, whole: bool, frontier: int) -> tuple[VisibleKey, ...]:
        """Keys of this answer as clients send it back: with its reasoning, and without.

        None for an answer to results alone: what stands before them is not in the request.
        """
        if self.wanted.results is not None and self.wanted.results.alone:
            return ()
        said = gather(self._said)
        calls = tuple(ToolCall(id, *call) for id, call in zip(said.call_ids, said.calls))
        reasoning = (Reasoning(said.reasoning),) if said.reasoning.strip() else ()
        shapes = [(*shape, TextPart(said.content), *calls) for shape in dict.fromkeys((reasoning, ()))]
        keys = [self.encoded.key_of_answer(Message("assistant", parts), replay, whole) for parts in shapes]
        return tuple(VisibleKey(key, VISIBLE[self.turn.api], frontier) for key in dict.fromkeys(keys))

    def blocks_in(self, tokens: Sequence[int]) -> tuple[ToolBlock, ...]:
        known = [part.id for message in self.turn.conversation.messages for part in message.parts
                 if isinstance(part, ToolCall)]
        return self._tool_memory.blocks_in([*known, *self._call_ids], tokens)

    def saves(self, reason: Reason, tokens: int) -> None:
        if self._trace:
            self._trace.happened(f"stored checkpoint reason={reason} tokens={tokens}")

    def _bytes(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except ValueError:
            return REPLACEMENT

    def _logprob(self, step: Step) -> TokenLogprob:
        top = tuple((token, self._bytes(token), logprob) for token, logprob in step.top)
        return TokenLogprob(step.token, self._bytes(step.token), step.logprob, top)

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
        recovered = sum(isinstance(event, Recovered) for event in self._said)
        source = self.source if self._timings.started is not None else None
        return Ended(self.turn.api, _how(end), end.usage, self._timings, source,
                     max(0, self._reached - end.usage.cached_tokens), self.encoded.replays,
                     self._reused.disk_miss if self._reused else "", recovered)

    def _known(self, stage: Stage, finish: str = "") -> Known:
        timings = self._timings
        return Known(self.turn.request_id, self.turn.api, stage, self.place, self.prompt_tokens, self._reached,
                     self._completion_tokens, self._slot, self._reused,
                     round(timings.prefill_tps(self._reached - self.cached_tokens), 1),
                     round(timings.decode_tps(self._completion_tokens), 1), round(timings.total_s, 3), finish,
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


class _Samplings:
    """The request's sampling and its stricter variants, each made once: a step costs a lookup."""

    def __init__(self, turn: Turn, tokenizer: Tokenizer) -> None:
        banned = turn.sampling.banned
        if turn.conversation.tools_banned:
            banned |= {tokenizer.control[DSML]}
        self._plain = replace(turn.sampling, banned=banned)
        self._eos = tokenizer.eos
        self._made: dict[tuple[bool, bool], Sampling] = {(False, False): self._plain}

    def of(self, greedy: bool, mask_eos: bool) -> Sampling:
        made = self._made.get((greedy, mask_eos))
        if made is None:
            made = self._plain
            made = replace(made, temperature=0.0) if greedy else made
            if mask_eos:  # with the best token reported, to see whether it was EOS
                made = replace(made, banned=made.banned | {self._eos}, top_logprobs=max(1, made.top_logprobs))
            self._made[greedy, mask_eos] = made
        return made


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
