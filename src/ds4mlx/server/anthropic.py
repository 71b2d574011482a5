"""POST /v1/messages and /v1/messages/count_tokens: body -> Turn, events -> one message or its stream."""
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.events import (
    Event, Finish, FinishReason, Progress, ReasoningDelta, ReasoningEnd, Recovered, TextDelta, ToolArgsDelta,
    ToolCallEnd, ToolCallStart, gather)
from ds4mlx.chat.json_text import parse, spell
from ds4mlx.chat.messages import Conversation, Json
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server import exchange
from ds4mlx.server.anthropic_messages import read_messages, read_system, read_tool_choice, read_tools
from ds4mlx.server.controls import read_model, read_most_reasoning, read_sampling, read_stop, read_thinking
from ds4mlx.server.errors import Line, anthropic_shape, engine_error
from ds4mlx.server.fields import Fields
from ds4mlx.server.sealed import seal
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn

STOP_REASON: dict[FinishReason, str] = {"stop": "end_turn", "stop_string": "stop_sequence", "tool_calls": "tool_use",
                                        "length": "max_tokens", "cancelled": "end_turn", "error": "end_turn"}
SESSION_HEADERS = ("x-claude-code-session-id", "x-claude-code-agent-id")
CONTEXT_BETA = "model-context-window-exceeded"  # a client that names it knows the stop reason of that name
WAITING = b": waiting\n\n"                      # before message_start, which a ping may not precede


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    settings = service.settings
    asked = await exchange.read(
        request, lambda body: read_asked(Fields(body), settings, request.state.request_id, request.headers))
    answer = await service.run(replace(asked.turn, received=exchange.received(request, asked.model, asked.stream)))
    head = Head("msg_" + secrets.token_hex(12), asked, service.context, settings.anthropic_usage == "flat")
    # `spell` keeps the numbers of a call's input as the model wrote them; any JSON writer would round some.
    return await exchange.reply(
        request, answer, EventWriter(head) if asked.stream else None, lambda events, headers: Response(
            clean_text(spell(message(head, events))) + "\n", media_type="application/json", headers=headers))


async def count_tokens(request: Request) -> Response:
    """How long the prompt is. Nothing is queued: it is answered while the engine computes."""
    service: Service = request.app.state.service
    turn = await exchange.read(
        request, lambda body: read_asked(Fields(body | {"tool_choice": None}), service.settings).turn)
    return Line({"input_tokens": await service.count(turn)})


routes = [Route("/v1/messages", messages, methods=["POST"]),
          Route("/v1/messages/count_tokens", count_tokens, methods=["POST"])]


# ---- reading

@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the turn, and how its answer is to be written."""
    turn: Turn
    model: str
    stream: bool
    shows_thinking: bool = True       # False: blocks without their text, the signature alone
    knows_full_context: bool = False  # that an answer may stop for it


def read_asked(body: Fields, settings: Settings, request_id: str = "",
               headers: Mapping[str, str] | None = None) -> Asked:
    """The fields that mean something here; others are ignored. Raises BadRequest naming the field at fault."""
    headers = headers or {}
    if body.array("mcp_servers"):
        raise BadRequest("mcp_servers is not supported: this server calls nobody; leave it out", param="mcp_servers")
    model, tools, said = read_model(body, settings), read_tools(body), read_messages(body)
    thinking, effort = read_thinking(body, model, settings)
    choice = read_tool_choice(body, tools)
    conversation = Conversation(
        (*read_system(body), *said), tools, thinking, effort, _read_format(body), tools_banned=choice.banned,
        must_call=choice.must_call, continue_final=said[-1].role == "assistant", ids=_hints(body, headers))
    turn = Turn(conversation, read_sampling(body, settings), max_tokens=body.integer("max_tokens", 1),
                stop=read_stop(body, "stop_sequences"), one_call=choice.one_call,
                most_reasoning=read_most_reasoning(body, settings), api="anthropic", request_id=request_id)
    return Asked(turn, model, body.boolean("stream") or False, _shows_thinking(body),
                 CONTEXT_BETA in headers.get("anthropic-beta", ""))


def _shows_thinking(body: Fields) -> bool:
    thinking = body.get("thinking")
    if not isinstance(thinking, dict):
        return True
    given = Fields(thinking, "thinking")
    given.integer("budget_tokens", 0)  # checked, whether it is kept to or not
    return given.string("display") != "omitted"


def _read_format(body: Fields) -> dict[str, Json] | None:
    """The schema that the answer is to keep, as prompts spell it."""
    output = body.object("output_config") or Fields({}, "output_config")
    wanted = output.object("format") or body.object("output_format")
    if wanted is None:
        return None
    if wanted.choice("type", ("json_schema",)) is None:
        raise wanted.error("type", "json_schema")
    schema = wanted.object("schema")
    if schema is None:
        raise wanted.error("schema", "an object")
    return {"type": "json_schema", "json_schema": {"schema": schema.members}}


def _hints(body: Fields, headers: Mapping[str, str]) -> tuple[str, ...]:
    """What tells conversations apart. Nothing of it is rendered."""
    session = "/".join(value for header in SESSION_HEADERS if (value := headers.get(header)))
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return tuple(hint for hint in (session, user) if isinstance(hint, str) and hint)


# ---- writing

@dataclass(frozen=True, slots=True)
class Head:
    """What frames one answer. context: most tokens of prompt and answer; flat: usage without writes to the cache."""
    id: str
    asked: Asked
    context: int
    flat: bool = False

    def message(self, content: list[Json], ending: dict[str, Json], usage: dict[str, Json]) -> dict[str, Json]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.asked.model, "content": content,
                **ending, "usage": usage}

    def ending(self, end: Finish) -> dict[str, Json]:
        reason = STOP_REASON[end.reason]
        full = end.usage.prompt_tokens + end.usage.completion_tokens >= self.context
        if end.reason == "length" and full and self.asked.knows_full_context:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": end.stop_string}

    def usage(self, prompt: int, cached: int, output: int) -> dict[str, Json]:
        """Three parts that add up to the prompt. What was not read from the cache has been written to it."""
        cached = min(cached, prompt)
        fresh, written = (prompt - cached, 0) if self.flat else (0, prompt - cached)
        return {"input_tokens": fresh, "cache_creation_input_tokens": written, "cache_read_input_tokens": cached,
                "output_tokens": output}

    def thinking(self, text: str) -> str:
        return text if self.asked.shows_thinking else ""


def message(head: Head, events: list[Event]) -> dict[str, Json]:
    """The whole answer as one message. A call that was cut off is left out: half an input is none."""
    said, end = gather(events), events[-1]
    assert isinstance(end, Finish), "an answer without Finish"
    content: list[Json] = []
    if said.reasoning:
        content.append({"type": "thinking", "thinking": head.thinking(said.reasoning),
                        "signature": seal(said.reasoning)})
    if said.content:
        content.append({"type": "text", "text": said.content})
    content += [{"type": "tool_use", "id": id, "name": name, "input": parse(arguments)}
                for id, (name, arguments) in zip(said.call_ids, said.calls)]
    usage = head.usage(end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens)
    return head.message(content or [{"type": "text", "text": ""}], head.ending(end), usage)


class EventWriter:
    """The answer as Anthropic's events: a Writer of `sse`. One block is open at a time."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.started = False
        self.open: str | None = None  # type of the open block
        self.blocks = 0               # opened so far
        self.reasoning = ""

    def opening(self) -> bytes:
        return WAITING

    def keepalive(self) -> bytes:
        return PING if self.started else WAITING

    def write(self, event: Event) -> bytes:
        match event:
            case Progress(done, total):
                return b"" if self.started else self._start(total, done)
            case ReasoningDelta(text):
                self.reasoning += text
                shown = self.head.thinking(text)  # an empty delta is a sign of life, where no text is wanted
                return self._in({"type": "thinking", "thinking": "", "signature": ""}) + self._delta(
                    {"type": "thinking_delta", "thinking": shown})
            case ReasoningEnd():
                return self._close()
            case TextDelta(text) | Recovered(text):
                return self._in({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})
            case ToolCallStart(_, name, id):
                return self._close() + self._in({"type": "tool_use", "id": id, "name": name, "input": {}})
            case ToolArgsDelta(_, fragment):
                return self._delta({"type": "input_json_delta", "partial_json": fragment})
            case ToolCallEnd():
                return self._close()
            case Finish():
                return self._ending(event)
        return b""

    def _start(self, prompt: int, cached: int) -> bytes:
        self.started = True
        nothing_yet = {"stop_reason": None, "stop_sequence": None}
        start = self.head.message([], nothing_yet, self.head.usage(prompt, cached, 0))
        return _frame({"type": "message_start", "message": start}) + PING

    def _in(self, block: dict[str, Json]) -> bytes:
        """Have this block open: opened unless one of its type is."""
        if self.open == block["type"]:
            return b""
        closed = self._close()
        self.open, self.blocks = str(block["type"]), self.blocks + 1
        return closed + _frame({"type": "content_block_start", "index": self.blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Json]) -> bytes:
        return _frame({"type": "content_block_delta", "index": self.blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        signature = b""
        if self.open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": seal(self.reasoning)})
        self.open = None
        return signature + _frame({"type": "content_block_stop", "index": self.blocks - 1})

    def _ending(self, end: Finish) -> bytes:
        if end.reason == "error":
            return _frame(anthropic_shape(engine_error(end.error or "the answer failed", end.error_code)))
        usage = end.usage
        start = b"" if self.started else self._start(usage.prompt_tokens, usage.cached_tokens)
        empty = b"" if self.blocks else self._in({"type": "text", "text": ""})
        counted = self.head.usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return start + empty + self._close() + _frame(
            {"type": "message_delta", "delta": self.head.ending(end), "usage": counted}) + _frame(
            {"type": "message_stop"})


def _frame(event: dict[str, Json]) -> bytes:
    """An event under the name that its type is."""
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


PING = _frame({"type": "ping"})
