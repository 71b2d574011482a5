"""POST /v1/chat/completions: body -> Turn, events -> one completion or its chunks. No tokens and no tensors here."""
import json
import math
import secrets
import time
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.chat.events import (
    Event, Finish, FinishReason, Progress, ReasoningDelta, Recovered, TextDelta, TokenLogprob, ToolArgsDelta,
    ToolCallStart, Usage)
from ds4mlx.chat.messages import Conversation, Json
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server import exchange
from ds4mlx.server.controls import (
    read_logprobs, read_model, read_most_reasoning, read_sampling, read_stop, read_thinking)
from ds4mlx.server.errors import Line, engine_error, openai_shape
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_messages import read_messages, read_must_call, read_tool_choice, read_tools
from ds4mlx.server.sse import frame
from ds4mlx.service.answer import Answer
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn

UNSUPPORTED = ("audio", "prediction", "web_search_options")
FINISH: dict[FinishReason, str] = {"stop": "stop", "stop_string": "stop", "tool_calls": "tool_calls",
                                   "length": "length", "cancelled": "stop", "error": "stop"}
EMPTY_DELTA_EVERY = 3  # keepalives: some clients' watchdogs do not see comments
LEAST_LOGPROB = -9999.0  # JSON has no infinity


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    settings = service.settings
    hints = exchange.session_hints(request)
    chat = await exchange.read(
        request, lambda body: read_chat(Fields(body), settings, request.state.request_id, hints))
    answer = await service.run(replace(chat.turn, received=exchange.received(request, chat.model, chat.stream)))
    head = _Head(chat.model, f"ds4mlx-{service.info.fingerprint[:8]}")
    writer = ChunkWriter(chat, head, settings.reasoning_field, answer) if chat.stream else None
    return await exchange.reply(request, answer, writer, lambda events, headers: Line(
        completion(head, events, chat.turn.logprobs, settings.reasoning_field), headers=headers))


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


# ---- reading

@dataclass(frozen=True, slots=True)
class Chat:
    """A request: the turn, and how its answer is to be written."""
    turn: Turn
    model: str
    stream: bool
    include_usage: bool


def read_chat(body: Fields, settings: Settings, request_id: str = "", hints: tuple[str, ...] = ()) -> Chat:
    """The fields that mean something here; others are ignored. Raises BadRequest naming the field at fault."""
    _refuse_unsupported(body)
    model, tools = read_model(body, settings), read_tools(body)
    thinking, effort = read_thinking(body, model, settings)
    logprobs, top_logprobs = read_logprobs(body)
    conversation = Conversation(
        read_messages(body), tools, thinking, effort, _read_response_format(body),
        tools_banned=read_tool_choice(body, tools), must_call=read_must_call(body, tools),
        continue_final=body.boolean("continue_final_message") or False,
        ids=(*_hints(body), *hints))
    max_tokens = body.integer("max_completion_tokens", 0)
    turn = Turn(
        conversation, read_sampling(body, settings, top_logprobs),
        max_tokens=body.integer("max_tokens", 0) if max_tokens is None else max_tokens,
        stop=read_stop(body), logprobs=logprobs, one_call=body.boolean("parallel_tool_calls") is False,
        most_reasoning=read_most_reasoning(body, settings), request_id=request_id)
    options = body.object("stream_options") or Fields({}, "stream_options")
    return Chat(turn, model, body.boolean("stream") or False, options.boolean("include_usage") or False)


def _refuse_unsupported(body: Fields) -> None:
    if body.integer("n", 1) not in (None, 1):
        raise body.error("n", "1; send several requests for several answers")
    for member in UNSUPPORTED:
        if body.get(member) is not None:
            raise BadRequest(f"{member} is not supported; leave it out", param=member)
    if body.array("modalities") not in (None, ["text"]):
        raise BadRequest('modalities must be ["text"]; nothing else is produced', param="modalities")


def _read_response_format(body: Fields) -> dict[str, Json] | None:
    wanted = body.object("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.error("type", "text, json_object or json_schema")
    if kind == "json_schema" and wanted.object("json_schema") is None:
        raise wanted.error("json_schema", "an object")
    return None if kind == "text" else wanted.members


def _hints(body: Fields) -> tuple[str, ...]:
    return tuple(hint for member in ("session_id", "prompt_cache_key") if (hint := body.string(member)))


# ---- writing

@dataclass(frozen=True, slots=True)
class _Head:
    """What every chunk of one answer repeats."""
    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: "chatcmpl-" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, kind: str, choices: list[Json]) -> dict[str, Json]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices,
                "system_fingerprint": self.fingerprint}


def completion(head: _Head, events: list[Event], logprobs: bool, reasoning_field: str) -> dict[str, Json]:
    """The whole answer as one chat.completion object."""
    text, reasoning, calls, tokens, end = "", "", [], [], None
    for event in events:
        match event:
            case TextDelta(piece) | Recovered(piece):
                text += piece
            case ReasoningDelta(piece):
                reasoning += piece
            case ToolCallStart(_, name, id):
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolArgsDelta(index, fragment):
                calls[index]["function"]["arguments"] += fragment
            case TokenLogprob():
                tokens.append(_logprob(event))
            case Finish():
                end = event
    assert end is not None, "an answer without Finish"
    message: dict[str, Json] = {"role": "assistant", "content": text if text or not calls else None}
    message |= _reasoning(reasoning, reasoning_field) if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    choice = {"index": 0, "message": message, "logprobs": {"content": tokens, "refusal": None} if logprobs else None,
              "finish_reason": FINISH[end.reason]}
    return head.object("chat.completion", [choice]) | {"usage": usage_object(end.usage)}


class ChunkWriter:
    """The answer as chat.completion.chunk events: a Writer of `sse`."""

    def __init__(self, chat: Chat, head: _Head, reasoning_field: str, answer: Answer) -> None:
        self.chat, self.head, self.reasoning_field, self.answer = chat, head, reasoning_field, answer
        self.progress = Progress(0, 0)
        self.keepalives = 0
        self.logprobs: list[Json] = []  # of tokens whose text comes with the next delta

    def opening(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def keepalive(self) -> bytes:
        self.keepalives += 1
        if self.keepalives % EMPTY_DELTA_EVERY == 0:
            return self._delta({})
        return f": keepalive {self.progress.done}/{self.progress.total}\n\n".encode()

    def write(self, event: Event) -> bytes:
        match event:
            case TextDelta(text) | Recovered(text):
                return self._delta({"content": text})
            case ReasoningDelta(text):
                return self._delta(_reasoning(text, self.reasoning_field))
            case ToolCallStart(index, name, id):
                return self._delta({"tool_calls": [{"index": index, "id": id, "type": "function",
                                                    "function": {"name": name, "arguments": ""}}]})
            case ToolArgsDelta(index, fragment):
                return self._delta({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})
            case TokenLogprob():
                self.logprobs.append(_logprob(event))
            case Progress():
                self.progress = event
            case Finish():
                return self._ending(event)
        return b""

    def _ending(self, end: Finish) -> bytes:
        if end.reason == "error":
            fault = engine_error(end.error or "the answer failed", end.error_code)
            return _frame(openai_shape(fault)) + frame("[DONE]")
        last = self._delta({}, FINISH[end.reason])
        if self.chat.include_usage:
            # The headers were sent before it was known what can be reused.
            reused = {"cache_source": self.answer.source, "cache": self.answer.cache_line}
            last += _frame(self.head.object("chat.completion.chunk", [])
                           | {"usage": usage_object(end.usage), "ds4mlx": reused})
        return last + frame("[DONE]")

    def _delta(self, delta: dict[str, Json], finish: str | None = None) -> bytes:
        logprobs, self.logprobs = self.logprobs, []
        choice = {"index": 0, "delta": delta, "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
                  "finish_reason": finish}
        chunk = self.head.object("chat.completion.chunk", [choice])
        return _frame(chunk | {"usage": None} if self.chat.include_usage else chunk)


def usage_object(usage: Usage) -> dict[str, Json]:
    written = max(0, usage.prompt_tokens - usage.cached_tokens)
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


def _reasoning(text: str, reasoning_field: str) -> dict[str, Json]:
    return {"reasoning_content": text, "reasoning": text} if reasoning_field == "both" else {"reasoning_content": text}


def _logprob(event: TokenLogprob) -> dict[str, Json]:
    return _alternative(event.bytes, event.logprob) | {"top_logprobs": [_alternative(b, p) for _, b, p in event.top]}


def _alternative(spelling: bytes, logprob: float) -> dict[str, Json]:
    return {"token": spelling.decode("utf-8", "replace"),
            "logprob": logprob if math.isfinite(logprob) else LEAST_LOGPROB, "bytes": list(spelling)}


def _frame(value: Json) -> bytes:
    return frame(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
