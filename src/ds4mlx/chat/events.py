"""What happens while one answer is produced: one neutral event stream for every API.

The parser (`chat.stream`) yields the events of an answer's text; `service` adds Progress, Usage and Finish.
"""
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "stop_string", "tool_calls", "length", "cancelled", "error"]
Alternative = tuple[int, bytes, float]  # a token, its bytes, its log-probability


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning."""
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """No more reasoning comes."""
    natural: bool  # False: the answer ended while the model was still thinking


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""
    text: str


@dataclass(frozen=True, slots=True)
class ToolBlockStart:
    """Calls follow, in one block."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of an answer from 0."""
    index: int
    name: str
    id: str = ""    # what the client will name the call by; `service` gives it


@dataclass(frozen=True, slots=True)
class ToolArgsDelta:
    """A piece of a call's arguments."""
    index: int
    fragment: str  # the fragments of one call, joined, are one JSON object


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is complete. One that has no such event was cut."""
    index: int


@dataclass(frozen=True, slots=True)
class ToolBlockEnd:
    """The block of calls is complete."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Text, in the place of calls that could not be read."""
    text: str  # a malformed tool block given back verbatim, as visible text


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One visible token with its alternatives, most likely first. Only when the request asked for them."""
    token: int
    bytes: bytes
    logprob: float
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens ready so far, of all of them; `done` starts at the reused length."""
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""
    prompt_tokens: int
    cached_tokens: int      # of the prompt, not computed again
    completion_tokens: int  # sampled, with reasoning and tool blocks, without the final EOS
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every answer."""
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    error: str | None = None       # what to tell the client, with reason "error"
    error_code: str | None = None  # as "incomplete_tool_call"


ParserEvent = (ReasoningDelta | ReasoningEnd | TextDelta | ToolBlockStart | ToolCallStart | ToolArgsDelta
               | ToolCallEnd | ToolBlockEnd | Recovered)
Event = ParserEvent | TokenLogprob | Progress | Finish


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, as a client that does not stream gets it."""
    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]  # (name, JSON text of the arguments) of each completed call
    call_ids: tuple[str, ...] = ()


def gather(events: Iterable[Event]) -> Answer:
    """Events of one answer -> the answer. A call that never ended is left out."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, list[str]] = {}
    ids: dict[int, str] = {}
    ended: list[int] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case TextDelta(text) | Recovered(text):
                content.append(text)
            case ToolCallStart(index, name, id):
                calls[index], ids[index] = [name], id
            case ToolArgsDelta(index, fragment):
                calls[index].append(fragment)
            case ToolCallEnd(index):
                ended.append(index)
    whole = tuple((calls[index][0], "".join(calls[index][1:])) for index in ended)
    return Answer("".join(reasoning), "".join(content), whole, tuple(ids[index] for index in ended))
