"""POST /v1/completions: a prompt as a question of its own, or `raw`, to be gone on with as it is -> text or chunks."""
import codecs
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.events import Event, Finish, Progress, ReasoningDelta, Recovered, TextDelta, TokenLogprob, gather
from ds4mlx.chat.messages import Conversation, Json, Message, TextPart
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server import exchange
from ds4mlx.server.controls import (
    MAX_TOP_LOGPROBS, read_model, read_most_reasoning, read_sampling, read_stop, read_thinking)
from ds4mlx.server.errors import Line, engine_error, openai_shape
from ds4mlx.server.fields import Fields, found
from ds4mlx.server.openai_chat import EMPTY_DELTA_EVERY, FINISH, LEAST_LOGPROB, usage_object
from ds4mlx.server.sse import frame
from ds4mlx.service.answer import Answer
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await exchange.read(
        request, lambda body: read_completion(Fields(body), service.settings, request.state.request_id))
    turn = replace(asked.turn, received=exchange.received(request, asked.model, asked.stream))
    answer = await _run(service, replace(asked, turn=turn))
    head = _Head(asked.model, f"ds4mlx-{service.info.fingerprint[:8]}")
    return await exchange.reply(request, answer, ChunkWriter(asked, head) if asked.stream else None,
                                lambda events, headers: Line(completion(head, events), headers=headers))


async def _run(service: Service, asked: "Completion") -> Answer:
    """The answer to a question, or what follows a raw prompt. Raises BadRequest."""
    if asked.ids is not None:
        for token in asked.ids:
            try:
                service.tokenizer.token_bytes(token)
            except ValueError as unknown:
                raise BadRequest(f"prompt: {unknown}", param="prompt") from None
        return service.complete(asked.turn, asked.ids)
    if asked.raw is not None:
        return await service.complete_text(asked.turn, asked.raw)
    return await service.run(asked.turn)


routes = [Route("/v1/completions", completions, methods=["POST"])]


# ---- reading

@dataclass(frozen=True, slots=True)
class Completion:
    """A request. Its prompt is in the turn's conversation, or to be gone on with: as `ids` or as `raw` text."""
    turn: Turn
    model: str
    stream: bool
    include_usage: bool
    ids: list[int] | None = None
    raw: str | None = None


def read_completion(body: Fields, settings: Settings, request_id: str = "") -> Completion:
    """The fields that mean something here; others are ignored. Raises BadRequest naming the field at fault."""
    _refuse_unsupported(body)
    model, prompt = read_model(body, settings), read_prompt(body)
    top_logprobs = body.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    raw = body.boolean("raw") or isinstance(prompt, list)
    conversation = Conversation((), thinking=False)
    if isinstance(prompt, str) and not raw:
        thinking, effort = read_thinking(body, model, settings)
        conversation = Conversation((Message("user", (TextPart(prompt),)),), (), thinking, effort)
    turn = Turn(conversation, read_sampling(body, settings, top_logprobs or 0),
                max_tokens=body.integer("max_tokens", 0), stop=read_stop(body), logprobs=top_logprobs is not None,
                most_reasoning=read_most_reasoning(body, settings), api="completions", param="prompt",
                request_id=request_id)
    options = body.object("stream_options") or Fields({}, "stream_options")
    return Completion(turn, model, body.boolean("stream") or False, options.boolean("include_usage") or False,
                      ids=prompt if isinstance(prompt, list) else None,
                      raw=prompt if isinstance(prompt, str) and raw else None)


def _refuse_unsupported(body: Fields) -> None:
    for member in ("n", "best_of"):
        if body.integer(member, 1) not in (None, 1):
            raise body.error(member, "1; send several requests for several answers")
    if body.string("suffix"):
        raise BadRequest("suffix is not supported: this model completes at the end only; leave it out", param="suffix")
    if body.boolean("echo"):
        raise BadRequest("echo is not supported; the prompt is the client's already", param="echo")


def read_prompt(body: Fields) -> str | list[int]:
    """`prompt`: a string or token ids, either alone in an array too. Raises BadRequest for several prompts."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BadRequest(f"prompt is {len(prompt)} prompts, need one; send several requests", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return clean_text(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise body.error("prompt", "a string, or an array of token ids that is not empty")
    for i, token in enumerate(prompt):
        if not isinstance(token, int) or isinstance(token, bool):
            raise BadRequest(f"prompt[{i}] is {found(token)}, need a token id", param="prompt")
    return prompt


# ---- writing

@dataclass(frozen=True, slots=True)
class _Head:
    """What every chunk of one answer repeats."""
    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: "cmpl-" + secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, choices: list[Json]) -> dict[str, Json]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
                "choices": choices, "system_fingerprint": self.fingerprint}


def completion(head: _Head, events: list[Event]) -> dict[str, Json]:
    """The whole answer as one text_completion object. Reasoning is no part of its text."""
    end, said = events[-1], gather(events)
    assert isinstance(end, Finish)
    tokens = [event for event in events if isinstance(event, TokenLogprob)]
    choice: dict[str, Json] = {"index": 0, "text": said.content,
                               "logprobs": Logprobs().object(tokens) if tokens else None,
                               "finish_reason": FINISH[end.reason]}
    if said.reasoning:
        choice["reasoning_content"] = said.reasoning
    return head.object([choice]) | {"usage": usage_object(end.usage)}


class ChunkWriter:
    """The answer as text_completion chunks: a Writer of `sse`."""

    def __init__(self, asked: Completion, head: _Head) -> None:
        self.asked, self.head = asked, head
        self.progress = Progress(0, 0)
        self.keepalives = 0
        self.offsets = Logprobs()
        self.logprobs: list[TokenLogprob] = []  # of tokens whose text comes with the next chunk

    def opening(self) -> bytes:
        return self._chunk("")

    def keepalive(self) -> bytes:
        self.keepalives += 1
        if self.keepalives % EMPTY_DELTA_EVERY == 0:
            return self._chunk("")
        return f": keepalive {self.progress.done}/{self.progress.total}\n\n".encode()

    def write(self, event: Event) -> bytes:
        match event:
            case TextDelta(text) | Recovered(text):
                return self._chunk(text)
            case ReasoningDelta(text):
                return self._chunk("", reasoning=text)
            case TokenLogprob():
                self.logprobs.append(event)
            case Progress():
                self.progress = event
            case Finish():
                return self._ending(event)
        return b""

    def _ending(self, end: Finish) -> bytes:
        if end.reason == "error":
            fault = engine_error(end.error or "the answer failed", end.error_code)
            return _frame(openai_shape(fault)) + frame("[DONE]")
        last = self._chunk("", FINISH[end.reason])
        if self.asked.include_usage:
            last += _frame(self.head.object([]) | {"usage": usage_object(end.usage)})
        return last + frame("[DONE]")

    def _chunk(self, text: str, finish: str | None = None, reasoning: str = "") -> bytes:
        tokens, self.logprobs = self.logprobs, []
        choice: dict[str, Json] = {"index": 0, "text": text,
                                   "logprobs": self.offsets.object(tokens) if tokens else None,
                                   "finish_reason": finish}
        if reasoning:
            choice["reasoning_content"] = reasoning
        chunk = self.head.object([choice])
        return _frame(chunk | {"usage": None} if self.asked.include_usage else chunk)


class Logprobs:
    """Tokens in the parallel lists of this API. Where each begins in the text goes on from call to call."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters that the tokens so far have completed

    def object(self, tokens: Sequence[TokenLogprob]) -> dict[str, Json]:
        offsets: list[Json] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.bytes))
        tops: list[Json] = [{_spelled(b): _finite(p) for _, b, p in token.top} for token in tokens]
        return {"tokens": [_spelled(token.bytes) for token in tokens],
                "token_logprobs": [_finite(token.logprob) for token in tokens],
                "top_logprobs": tops if any(token.top for token in tokens) else None, "text_offset": offsets}


def _spelled(spelling: bytes) -> str:
    """A token as a member's name: pieces of a character, which differ, must not all become U+FFFD."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)  # JSON has no infinity


def _frame(value: Json) -> bytes:
    return frame(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
