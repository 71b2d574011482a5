"""POST /v1/responses: body -> Turn, events -> a response or its event stream; GET and DELETE of stored ones."""
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.events import Event, Finish
from ds4mlx.chat.messages import Conversation, Json, Message, TextPart
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server import exchange
from ds4mlx.server.controls import read_model, read_most_reasoning, read_sampling, read_stop, read_thinking
from ds4mlx.server.errors import Line, engine_error
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_messages import read_must_call, read_tool_choice
from ds4mlx.server.responses_events import Asked, Object, ResponseWriter
from ds4mlx.server.responses_input import input_items, only_results, read_input, resolved
from ds4mlx.server.responses_store import ResponseStore
from ds4mlx.server.responses_tools import read_wire_tools
from ds4mlx.service.answer import Answer
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn

SUMMARIES = ("auto", "concise", "detailed")
SEALED = "reasoning.encrypted_content"
OWN_NAMES = {"messages": "input", "response_format": "text.format"}  # of what is called otherwise elsewhere


async def responses(request: Request) -> Response:
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    settings = service.settings
    hints = exchange.session_hints(request)
    asked = await exchange.read(
        request, lambda body: read_request(Fields(body), settings, store, request.state.request_id, hints))
    received = exchange.received(request, asked.writing.model, asked.stream)
    answer = await _run(service, replace(asked.turn, received=received))
    writer = ResponseWriter(asked.writing, asked.keep,
                            lambda: {"cache_source": answer.source, "cache": answer.cache_line})
    begun = await _Begun.of(answer) if asked.stream and only_results(asked.turn.conversation.messages) else None
    return await exchange.reply(request, answer, writer if asked.stream else None,
                                lambda events, headers: Line(writer.whole(events), headers=headers), begun)


async def stored_response(request: Request) -> Response:
    """GET: a stored response as it was sent. DELETE: forget it."""
    store: ResponseStore = request.app.state.responses
    id = request.path_params["id"]
    if request.method == "DELETE":
        if store.delete(id):
            return Line({"id": id, "object": "response", "deleted": True})
    elif (response := store.response(id)) is not None:
        return Line(response)
    raise BadRequest(f"response {id[:80]!r} is not stored here; the last ones are, in memory", code="not_found",
                     status=404)


routes = [Route("/v1/responses", responses, methods=["POST"]),
          Route("/v1/responses/{id}", stored_response, methods=["GET", "DELETE"])]


async def _run(service: Service, turn: Turn) -> Answer:
    try:
        return await service.run(turn)
    except BadRequest as fault:
        if fault.param not in OWN_NAMES:
            raise
        raise BadRequest(str(fault), param=OWN_NAMES[fault.param], code=fault.code, status=fault.status,
                         details=fault.details) from fault


class _Begun:
    """An answer whose first events were awaited: what needs a state that is gone is refused with a status, and not in a
    stream that has begun."""

    def __init__(self, answer: Answer, first: list[Event]) -> None:
        self._answer, self._first = answer, first

    @classmethod
    async def of(cls, answer: Answer) -> "_Begun":
        """Raises BadRequest when the answer has failed."""
        try:
            first = await answer.batch()
        except BaseException:
            await answer.aclose()
            raise
        if isinstance(first[-1], Finish) and first[-1].reason == "error":
            raise engine_error(first[-1].error or "the answer failed", first[-1].error_code)
        return cls(answer, first)

    async def batch(self) -> list[Event]:
        first, self._first = self._first, []
        return first or await self._answer.batch()

    async def aclose(self) -> None:
        await self._answer.aclose()

    @property
    def place(self) -> int:
        return self._answer.place


# ---- reading

@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request: the turn, how its answer is to be written, and what is to be done with the response."""
    turn: Turn
    writing: Asked
    stream: bool
    keep: Callable[[Object], None]


def read_request(body: Fields, settings: Settings, store: ResponseStore, request_id: str = "",
                 hints: tuple[str, ...] = ()) -> ResponseRequest:
    """The fields that mean something here; others are ignored. Raises BadRequest naming the field at fault."""
    _refuse_unsupported(body)
    model = read_model(body, settings)
    items, previous = resolved(input_items(body), store.item), body.string("previous_response_id")
    read = read_input([*_history(previous, store), *items], read_wire_tools(body))
    instructions = body.string("instructions")
    leading = (Message("system", (TextPart(instructions),)),) if instructions else ()
    thinking, effort = read_thinking(body, model, settings)
    conversation = Conversation(
        (*leading, *read.messages), read.tools.tools, thinking, effort, _read_format(body),
        tools_banned=read_tool_choice(body, read.tools.tools), must_call=read_must_call(body, read.tools.tools),
        ids=(*_hints(body), *hints))
    limit = body.integer("max_output_tokens", 0)
    turn = Turn(
        conversation, read_sampling(body, settings),
        max_tokens=body.integer("max_tokens", 0) if limit is None else limit, stop=read_stop(body),
        one_call=body.boolean("parallel_tool_calls") is False, most_reasoning=read_most_reasoning(body, settings),
        api="responses", param="input", request_id=request_id)
    reasoning = body.object("reasoning") or Fields({}, "reasoning")
    writing = Asked(model, _echoed(body, turn), read.tools, reasoning.choice("summary", SUMMARIES) is not None,
                    settings.always_seal or SEALED in (body.array("include") or ()), settings.raw_reasoning_events)
    stored = body.boolean("store") is not False

    def keep(response: Object) -> None:
        if stored:
            store.keep(response, items, previous)

    return ResponseRequest(turn, writing, body.boolean("stream") or False, keep)


def _refuse_unsupported(body: Fields) -> None:
    for member in ("conversation", "prompt"):
        if body.get(member) is not None:
            raise BadRequest(f"{member} is not supported; send the items in input", param=member)
    if body.boolean("background"):
        raise BadRequest("background is not supported; leave it out and stream the answer", param="background")
    body.choice("truncation", ("auto", "disabled"))


def _history(previous: str | None, store: ResponseStore) -> list[Json]:
    """The items that a request goes on from."""
    if previous is None:
        return []
    if not store.enabled:
        raise BadRequest("previous_response_id needs stored responses, and --responses-store is 0; send the whole "
                         "conversation", param="previous_response_id")
    history = store.history(previous)
    if history is None:
        raise BadRequest(f"previous_response_id is {previous[:80]!r}, which is not stored here; send the whole "
                         "conversation", param="previous_response_id", code="previous_response_not_found", status=404)
    return history


def _read_format(body: Fields) -> dict[str, Json] | None:
    """`text.format`, in the shape that chat requests have it."""
    text = body.object("text") or Fields({}, "text")
    wanted = text.object("format")
    if wanted is None:
        return None
    kind = wanted.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.error("type", "text, json_object or json_schema")
    if kind != "json_schema":
        return None if kind == "text" else {"type": kind}
    if wanted.object("schema") is None:
        raise wanted.error("schema", "an object")
    return {"type": kind, kind: {key: value for key, value in wanted.members.items() if key != "type"}}


def _hints(body: Fields) -> tuple[str, ...]:
    return tuple(hint for member in ("session_id", "prompt_cache_key") if (hint := body.string(member)))


def _echoed(body: Fields, turn: Turn) -> Object:
    """What a response repeats of its request, with what was taken for absent members. Lone surrogates are replaced:
    they can be received, but not sent."""
    reasoning = body.object("reasoning") or Fields({}, "reasoning")
    text = body.object("text") or Fields({}, "text")
    echoed = {"instructions": body.get("instructions"), "tools": body.array("tools") or [],
              "tool_choice": body.get("tool_choice") or "auto", "temperature": turn.sampling.temperature,
              "top_p": turn.sampling.top_p, "max_output_tokens": turn.max_tokens,
              "previous_response_id": body.get("previous_response_id"),
              "parallel_tool_calls": not turn.one_call,
              "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
              "store": body.boolean("store") is not False, "truncation": body.get("truncation") or "disabled",
              "text": {"format": text.get("format") or {"type": "text"}}, "user": body.string("user"),
              "metadata": (body.object("metadata") or Fields({}, "metadata")).members}
    return json.loads(clean_text(json.dumps(echoed, ensure_ascii=False)))
