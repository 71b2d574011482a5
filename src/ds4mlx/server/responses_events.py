"""Events of an answer -> a response of the Responses API, item by item: as its event stream, or whole.

Both come from one `ResponseWriter`, so that they cannot differ.
"""
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.events import (
    Event, Finish, ReasoningDelta, ReasoningEnd, Recovered, TextDelta, ToolArgsDelta, ToolCallEnd, ToolCallStart, Usage)
from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Json
from ds4mlx.server.responses_tools import CUSTOM_PARAMETER, WireTool, WireTools
from ds4mlx.server.sealed import seal

Object = dict[str, Json]
Told = tuple[str, Object]  # an event's type and its other members

_CUSTOM_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_PARAMETER}"\s*:\s*"')
_CUSTOM_BODY = re.compile(r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
                          r'|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u])*')


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides how an answer is written. `echoed`: members of the request that a response repeats."""
    model: str
    echoed: Object
    tools: WireTools = WireTools()
    summary: bool = False        # reasoning is shown as a summary
    sealed: bool = False         # and comes along in a form that only this server reads
    raw_reasoning: bool = False  # and is streamed as it is
    id: str = field(default_factory=lambda: "resp_" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


class ResponseWriter:
    """A Writer of `sse`. `response` is the whole object at the end of the answer, of which `keep` is told then.

    reused: what is known by then of the prompt's reuse; a stream's headers go out before that.
    """

    def __init__(self, asked: Asked, keep: Callable[[Object], None] = lambda response: None,
                 reused: Callable[[], Object] = dict) -> None:
        self.asked, self._keep, self._reused = asked, keep, reused
        self.response: Object = {
            "id": asked.id, "object": "response", "created_at": asked.created, "status": "in_progress",
            "model": asked.model, "output": [], "usage": None, "error": None, "incomplete_details": None,
            **asked.echoed}
        self._item: _Reasoning | _Message | _Call | None = None  # the one that is being written
        self._output: list[Json] = []
        self._sequence = 0

    def opening(self) -> bytes:
        return self._frames(iter([("response.created", {"response": self.response}),
                                  ("response.in_progress", {"response": self.response})]))

    def keepalive(self) -> bytes:
        """An event, because some clients count events and not bytes."""
        return self._frames(iter([("response.in_progress", {"response": {**self.response, "output": self._output}})]))

    def write(self, event: Event) -> bytes:
        return self._frames(self._told(event))

    def whole(self, events: list[Event]) -> Object:
        """The response that these events, the last a Finish, add up to."""
        for event in events:
            for _ in self._told(event):
                pass
        return self.response

    def _frames(self, told: Iterator[Told]) -> bytes:
        return b"".join(self._frame(type, members) for type, members in told)

    def _frame(self, type: str, members: Object) -> bytes:
        data = json.dumps({"type": type, "sequence_number": self._sequence, **members}, ensure_ascii=False,
                          separators=(",", ":"))
        self._sequence += 1
        return f"event: {type}\ndata: {data}\n\n".encode()

    def _told(self, event: Event) -> Iterator[Told]:
        match event:
            case ReasoningDelta(text):
                if self.asked.summary or self.asked.sealed or self.asked.raw_reasoning:
                    yield from self._in(_Reasoning, lambda index: _Reasoning(index, self.asked))
                    yield from self._item.add(text)
            case ReasoningEnd(natural):
                if isinstance(self._item, _Reasoning):
                    yield from self._close(whole=natural)
            case TextDelta(text) | Recovered(text):
                yield from self._in(_Message, _Message)
                yield from self._item.add(text)
            case ToolCallStart(_, name, id):
                yield from self._close()
                wire = self.asked.tools.called(name)
                yield from self._in(_Call, lambda index: _Call(index, wire, id))
            case ToolArgsDelta(_, fragment):
                yield from self._item.add(fragment)
            case ToolCallEnd():
                yield from self._close()
            case Finish():
                yield from self._finish(event)

    def _in(self, kind: type, make: "Callable[[int], _Reasoning | _Message | _Call]") -> Iterator[Told]:
        """An item of this kind is open: the present one, or a new one."""
        if not isinstance(self._item, kind):
            yield from self._close()
            self._item = make(len(self._output))
            yield from self._item.opened()

    def _close(self, whole: bool = True) -> Iterator[Told]:
        if self._item is not None:
            yield from self._item.closed("completed" if whole else "incomplete")
            self._output = [*self._output, self._item.done]
            self._item = None

    def _finish(self, end: Finish) -> Iterator[Told]:
        whole = end.reason in ("stop", "stop_string", "tool_calls")
        yield from self._close(whole)
        status = "completed" if whole else "incomplete" if end.reason == "length" else "failed"
        self.response = {**self.response, "status": status, "output": self._output, "usage": usage_object(end.usage),
                         "ds4mlx": self._reused()}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            code = end.error_code if end.error_code not in (None, "internal_error") else "server_error"
            self.response["error"] = {"code": code, "message": end.error or "the answer was given up"}
        else:
            self.response["completed_at"] = int(time.time())
        if status != "failed":
            self._keep(self.response)
        yield f"response.{status}", {"response": self.response}


# ---- items

class _Reasoning:
    """What the model thought: as its own summary, sealed, or both."""

    def __init__(self, index: int, asked: Asked) -> None:
        self._asked, self._index = asked, index
        self._pieces: list[str] = []
        self.done: Object = {"id": "rs_" + secrets.token_hex(12), "type": "reasoning", "status": "in_progress",
                             "summary": []}
        self._place: Object = {"item_id": self.done["id"], "output_index": index}

    def opened(self) -> Iterator[Told]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.done}
        if self._asked.summary:
            yield "response.reasoning_summary_part.added", {**self._place, "summary_index": 0, "part": _summary("")}

    def add(self, text: str) -> Iterator[Told]:
        self._pieces.append(text)
        if self._asked.raw_reasoning:
            yield "response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": text}
        if self._asked.summary:
            yield "response.reasoning_summary_text.delta", {**self._place, "summary_index": 0, "delta": text}

    def closed(self, status: str) -> Iterator[Told]:
        text = "".join(self._pieces)
        if self._asked.raw_reasoning:
            yield "response.reasoning_text.done", {**self._place, "content_index": 0, "text": text}
        if self._asked.summary:
            place, part = {**self._place, "summary_index": 0}, _summary(text)
            yield "response.reasoning_summary_text.done", {**place, "text": text}
            yield "response.reasoning_summary_part.done", {**place, "part": part}
            self.done = {**self.done, "summary": [part]}
        self.done = {**self.done, "status": status}
        if self._asked.raw_reasoning:
            self.done["content"] = [{"type": "reasoning_text", "text": text}]
        if self._asked.sealed:
            self.done["encrypted_content"] = seal(text)
        yield "response.output_item.done", {"output_index": self._index, "item": self.done}


class _Message:
    """Visible text."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._pieces: list[str] = []
        self.done: Object = {"id": "msg_" + secrets.token_hex(12), "type": "message", "status": "in_progress",
                             "role": "assistant", "content": []}
        self._place: Object = {"item_id": self.done["id"], "output_index": index, "content_index": 0}

    def opened(self) -> Iterator[Told]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.done}
        yield "response.content_part.added", {**self._place, "part": _output_text("")}

    def add(self, text: str) -> Iterator[Told]:
        self._pieces.append(text)
        yield "response.output_text.delta", {**self._place, "delta": text, "logprobs": []}

    def closed(self, status: str) -> Iterator[Told]:
        text = "".join(self._pieces)
        part = _output_text(text)
        self.done = {**self.done, "status": status, "content": [part]}
        yield "response.output_text.done", {**self._place, "text": text, "logprobs": []}
        yield "response.content_part.done", {**self._place, "part": part}
        yield "response.output_item.done", {"output_index": self._index, "item": self.done}


class _Call:
    """A call of a function, of a custom tool, or of the client's search of tools."""

    def __init__(self, index: int, wire: WireTool, call_id: str) -> None:
        self._index, self._wire, self._input = index, wire, _CustomText()
        self._pieces: list[str] = []
        prefix, kind, empty = _CALLS[wire.kind]
        self.done: Object = {"id": prefix + secrets.token_hex(12), "type": kind, "status": "in_progress",
                             "call_id": call_id, **({} if wire.kind == "tool_search" else {"name": wire.name}), **empty}
        if wire.namespace is not None:
            self.done["namespace"] = wire.namespace
        self._place: Object = {"item_id": self.done["id"], "output_index": index}

    def opened(self) -> Iterator[Told]:
        yield "response.output_item.added", {"output_index": self._index, "item": self.done}

    def add(self, fragment: str) -> Iterator[Told]:
        self._pieces.append(fragment)
        if self._wire.kind == "function":
            yield "response.function_call_arguments.delta", {**self._place, "delta": fragment}
        elif self._wire.kind == "custom" and (text := self._input.add(fragment)):
            yield "response.custom_tool_call_input.delta", {**self._place, "delta": text}

    def closed(self, status: str) -> Iterator[Told]:
        arguments = "".join(self._pieces)
        if self._wire.kind == "function":
            self.done = {**self.done, "arguments": arguments}
            yield "response.function_call_arguments.done", {**self._place, "name": self._wire.name,
                                                            "arguments": arguments}
        elif self._wire.kind == "custom":
            text = custom_input(arguments) if status == "completed" else self._input.said
            if rest := text[len(self._input.said):]:
                yield "response.custom_tool_call_input.delta", {**self._place, "delta": rest}
            self.done = {**self.done, "input": text}
            yield "response.custom_tool_call_input.done", {**self._place, "input": text}
        else:
            self.done = {**self.done, "arguments": _object(arguments)}
        self.done = {**self.done, "status": status}
        yield "response.output_item.done", {"output_index": self._index, "item": self.done}


# kind of tool -> what its items' ids begin with, their type, and the members that are filled in later
_CALLS: dict[str, tuple[str, str, Object]] = {
    "function": ("fc_", "function_call", {"arguments": ""}), "custom": ("ctc_", "custom_tool_call", {"input": ""}),
    "tool_search": ("tsc_", "tool_search_call", {"execution": "client", "arguments": {}})}


class _CustomText:
    """The text of a custom tool's call, read from its arguments as they come: each piece as soon as it is certain."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._pending, self._inside, self._ended = "", False, False

    @property
    def said(self) -> str:
        return "".join(self._said)

    def add(self, fragment: str) -> str:
        if self._ended:
            return ""
        self._pending += fragment
        if not self._inside:
            head = _CUSTOM_HEAD.match(self._pending)
            if head is None:
                return ""
            self._inside, self._pending = True, self._pending[head.end():]
        body = _CUSTOM_BODY.match(self._pending)[0]
        self._pending = self._pending[len(body):]
        self._ended = self._pending.startswith('"')
        self._said.append(json.loads(f'"{body}"', strict=False))
        return self._said[-1]


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call from its whole arguments, `{"input": text}`; a model may call it otherwise."""
    given = _object(arguments)
    value = given.get(CUSTOM_PARAMETER, next(iter(given.values())) if len(given) == 1 else given)
    return clean_text(value if isinstance(value, str) else spell(value))


def _object(arguments: str) -> Object:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {CUSTOM_PARAMETER: arguments}
    return value if isinstance(value, dict) else {CUSTOM_PARAMETER: value}


def _summary(text: str) -> Object:
    return {"type": "summary_text", "text": text}


def _output_text(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": []}


def usage_object(usage: Usage) -> Object:
    written = max(0, usage.prompt_tokens - usage.cached_tokens)
    return {"input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens}
