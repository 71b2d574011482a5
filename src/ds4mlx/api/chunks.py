"""The chunks of a server's stream, as far as they are read, into events."""
from collections.abc import Iterator
from typing import TypedDict, get_args

from ds4mlx.chat.events import (Event, Finish, FinishReason, ReasoningDelta, TextDelta, ToolArgsDelta, ToolCallEnd,
                                ToolCallStart, Usage)


class Function(TypedDict, total=False):
    name: str
    arguments: str


class Call(TypedDict, total=False):
    """The first chunk of a call has its id and name, each its next piece of arguments."""
    index: int
    id: str
    function: Function


class Delta(TypedDict, total=False):
    reasoning_content: str | None
    content: str | None
    tool_calls: list[Call]


class Choice(TypedDict, total=False):
    """`delta` in a chat, `text` in a completion."""
    delta: Delta
    text: str | None
    finish_reason: str | None


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Used(TypedDict):
    prompt_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens: int
    completion_tokens_details: ReasoningTokens


class Failure(TypedDict):
    message: str


class Chunk(TypedDict, total=False):
    choices: list[Choice]
    usage: Used | None
    error: Failure


def events(chunks: Iterator[Chunk]) -> Iterator[Event]:
    """Chunks of either API to events, the last of them Finish."""
    calls, reason, usage = 0, "cancelled", Usage(0, 0, 0, 0)
    for chunk in chunks:
        if used := chunk.get("usage"):
            usage = Usage(used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"],
                          used["completion_tokens"], used["completion_tokens_details"]["reasoning_tokens"])
        for choice in chunk["choices"]:
            delta = choice.get("delta") or Delta(content=choice.get("text"))
            if reasoning := delta.get("reasoning_content"):
                yield ReasoningDelta(reasoning)
            if text := delta.get("content"):
                yield TextDelta(text)
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls += 1
                    yield ToolCallStart(call["index"], call["function"]["name"], call["id"])
                if fragment := call["function"]["arguments"]:
                    yield ToolArgsDelta(call["index"], fragment)
            reason = choice.get("finish_reason") or reason
    yield from map(ToolCallEnd, range(calls if reason == "tool_calls" else 0))
    yield Finish(_reason(reason), usage)


def _reason(said: str) -> FinishReason:
    """What a server of ours says; "error" for anything else."""
    known: tuple[FinishReason, ...] = get_args(FinishReason)
    return next((reason for reason in known if reason == said), "error")
