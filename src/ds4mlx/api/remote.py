"""The same session on a live server: it speaks OpenAI's API, and asks `POST /tokenize` where tokens are wanted."""
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Self
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from ds4mlx.api import saved
from ds4mlx.api.answer import Answer
from ds4mlx.api.chunks import Chunk, events
from ds4mlx.api.rendering import (Messages, Rendered, Style, ToolChoice, answer_message, counted, listed, request,
                                   require_limits, strings)
from ds4mlx.chat.events import Event
from ds4mlx.chat.messages import Effort, Json
from ds4mlx.engine.protocol import Sampling
from ds4mlx.errors import BadRequest, Ds4Error
from ds4mlx.text.segments import BOS

TIMEOUT_S = 600.0   # of silence: a server sends keepalives while it reads a prompt
Body = dict[str, Json]


def connect(url: str = "http://127.0.0.1:8000", api_key: str | None = None) -> "Server":
    """A server of ours, by its address with or without `http://`. Raises Ds4Error where none answers."""
    server = Server((url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1"), api_key)
    server.models()
    return server


class Server:
    """What a `Model` is, elsewhere."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"}
                                                                if api_key else {})
        self._opener = build_opener(ProxyHandler({}) if "://127.0.0.1" in url or "://localhost" in url
                                    else ProxyHandler())

    def models(self) -> list[str]:
        """The names that the server's model goes by. Raises Ds4Error, BadRequest."""
        with self.open("/v1/models") as answer:
            try:
                return [model["id"] for model in json.load(answer)["data"]]
            except (ValueError, KeyError, TypeError) as fault:
                raise Ds4Error(f"what answers at {self.url} is no server of ours; give the address that ds4mlx serve "
                               "prints") from fault

    def __repr__(self) -> str:
        return f"<Server {self.url}>"

    def session(self) -> "RemoteSession":
        """An empty conversation."""
        return RemoteSession(self)

    def render(self, messages: str | Messages, tools: Sequence[dict[str, Json]] = (), *, thinking: bool | None = None,
               effort: Effort | None = None) -> Rendered:
        """As `Model.render`. The server has to run with --diagnostics."""
        return self.tokenize(request(listed(messages), Style(tuple(tools), thinking, effort)))

    def tokenize(self, body: Body) -> Rendered:
        """Of {"text": ...}, or of a chat request. Raises BadRequest, also where --diagnostics is off."""
        try:
            with self.open("/tokenize", body) as answer:
                found = json.load(answer)
        except BadRequest as fault:
            if fault.status != 404:
                raise
            raise BadRequest(f"{self.url} does not tell of tokens; start it with ds4mlx serve --diagnostics",
                             status=404) from fault
        return Rendered(found["text"], found["ids"])

    def open(self, path: str, body: Body | None = None) -> HTTPResponse:
        """Raises BadRequest for what the server refuses, Ds4Error where it does not answer."""
        try:
            data = None if body is None else json.dumps(body).encode()
        except TypeError as fault:
            raise BadRequest(f"{fault}; tools, messages and formats are JSON") from fault
        try:
            answer: HTTPResponse = self._opener.open(Request(self.url + path, data, self._headers), timeout=TIMEOUT_S)
            return answer
        except HTTPError as fault:
            with fault:
                raise BadRequest(_refusal(fault), status=fault.code) from None
        except (URLError, OSError, HTTPException, ValueError) as fault:    # ValueError: no address at all
            raise Ds4Error(f"{self.url} does not answer ({fault}); start it with ds4mlx serve, or give its address") \
                from fault

    def chunks(self, path: str, body: Body) -> Iterator[Chunk]:
        """The JSON of a streamed answer, as it comes. The request is sent when the first is asked for.

        Raises Ds4Error for an error in the stream and for one that ends early, and as `open` does.
        """
        with self.open(path, body | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
            for data in self._data(answer):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Ds4Error(chunk["error"]["message"])
                yield chunk

    def _data(self, answer: HTTPResponse) -> Iterator[bytes]:
        """Of each event before the one that says that it is whole."""
        fault: Exception | None = None
        try:
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield line[6:]
        except (OSError, HTTPException) as broken:
            fault = broken
        raise Ds4Error(f"the connection to {self.url} broke before the answer was whole; ask again") from fault


class RemoteSession:
    """`api.session.Session` over a server, which keeps the states: what of a prompt is there is not computed again.

    `tokens`, `text`, `rewind` and `complete` need a server with --diagnostics.
    """

    def __init__(self, server: Server) -> None:
        self.messages: list[dict[str, Json]] = []
        self.style = Style()
        self._server = server
        self._head: list[int] = []      # where `complete` goes on from; none while this is a conversation
        self._written = ""              # behind it
        self._answer: Answer | None = None
        self._chatting = False

    @property
    def tokens(self) -> list[int]:
        """A sampled text may be other tokens when it is encoded again."""
        self._settle()
        if not self._head:
            return self._rendered(len(self.messages)).tokens if self.messages else []
        return [*self._head, *(self._server.tokenize({"text": self._written}).tokens if self._written else [])]

    @property
    def text(self) -> str:
        """Of messages that are whole, and what was completed behind them."""
        self._settle()
        told = self._rendered(len(self.messages)).text if self.messages else BOS if self._head else ""
        return told + self._written

    def chat(self, said: str | Messages, *, tools: Sequence[dict[str, Json]] | None = None,
             tool_choice: ToolChoice | None = None, response_format: dict[str, Json] | None = None,
             thinking: bool | None = None, effort: Effort | None = None, max_tokens: int | None = None,
             sampling: Sampling | None = None, stop: str | Sequence[str] = ()) -> Answer:
        """As Session.chat; the request is sent when the answer is read, and what is refused is raised there."""
        require_limits(max_tokens, sampling)
        self._settle()
        self.style = Style(self.style.tools if tools is None else tuple(tools),
                           self.style.thinking if thinking is None else thinking, effort or self.style.effort)
        self.messages = [*self.messages, *listed(said)]
        self._head, self._written, self._chatting = [], "", True
        return self._begin("/v1/chat/completions", {**request(self.messages, self.style, tool_choice, response_format),
                                                    **_limits(max_tokens, sampling, stop)})

    def complete(self, text: str = "", *, max_tokens: int | None = None, sampling: Sampling | None = None,
                 stop: str | Sequence[str] = ()) -> Answer:
        """As Session.complete, behind tokens, since a server makes a question of a text."""
        require_limits(max_tokens, sampling)
        self._settle()
        question = self._server.render([{"role": "user", "content": ""}]) if not self.messages else None
        self._head = self._head or (question.tokens[:1] if question else self.tokens)
        self._written += text
        self._chatting = False
        return self._begin("/v1/completions", {"prompt": [*self.tokens], **_limits(max_tokens, sampling, stop)})

    def rewind(self, length: int) -> None:
        """As Session.rewind. Raises ValueError for a length that the session does not have."""
        tokens = self.tokens
        if not -len(tokens) <= length <= len(tokens):
            raise ValueError(f"the session has {len(tokens)} tokens, so it cannot go back to {length}")
        kept, told = tokens[:length], len(self.messages)
        while told and (ids := self._rendered(told).tokens) != kept[:len(ids)]:
            told -= 1
        whole = told and self._rendered(told).tokens == kept
        self.messages, self._head, self._written = self.messages[:told], [] if whole else kept, ""

    def fork(self) -> Self:
        """Another session in the same place; the server shares the states."""
        self._settle()
        other = type(self)(self._server)
        other.messages, other.style, other._head, other._written = [*self.messages], self.style, [*self._head], \
            self._written
        return other

    def save(self, path: Path | str) -> None:
        """Write down what was said, as Session.save does beside a state, which stays here. Raises OSError."""
        self._settle()
        saved.write_messages(Path(f"{path}.json").expanduser(), saved.Said(self.messages, self.style, tokens=self._head,
                                                                text=self._written))

    def load(self, path: Path | str) -> None:
        """What was saved here or by a Session. Raises CheckpointError, OSError."""
        self._settle()
        said = saved.read_messages(Path(f"{path}.json").expanduser())
        self.messages, self.style, self._head, self._written = said.messages, said.style, said.tokens, said.text

    def close(self) -> None:
        """End an answer that is being read; the server keeps the state as long as it has room."""
        self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteSession of {counted(len(self.messages), 'message')}, on {self._server.url}>"

    def _rendered(self, told: int) -> Rendered:
        """The first messages; a last answer is open to be gone on with."""
        return self._server.tokenize(request(self.messages[:told], self.style))

    def _begin(self, path: str, body: Body) -> Answer:
        self._answer = answer = Answer(iter(()))
        answer._events = self._answered(answer, events(self._server.chunks(path, body)))
        return answer

    def _answered(self, answer: Answer, events: Iterator[Event]) -> Iterator[Event]:
        yield from events
        self._keep(answer)

    def _settle(self) -> None:
        """Keep what was said of the answer that is being read, and let the server stop."""
        if self._answer is not None:
            self._answer.stop()
            self._keep(self._answer)

    def _keep(self, answer: Answer) -> None:
        """What was said of it, unless something else has been asked since."""
        if answer is not self._answer:
            return
        self._answer = None
        if self._chatting:
            self.messages.append(answer_message(answer.text, answer.reasoning, answer.calls, answer.call_ids))
        else:
            self._written += answer.text


def _limits(max_tokens: int | None, sampling: Sampling | None, stop: str | Sequence[str]) -> Body:
    """Members of a request; without `sampling` the server decides how answers are drawn."""
    asked = {} if sampling is None else _drawn(sampling)
    asked |= {} if max_tokens is None else {"max_tokens": max_tokens}
    return asked | ({"stop": list(strings(stop))} if stop else {})


def _drawn(sampling: Sampling) -> Body:
    if sampling.banned:  # the API has no such member, and the strongest bias that it takes is as good
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(sampling.banned, -100.0)})
    body: Body = {name: getattr(sampling, name) for name in (
        "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
        "repetition_penalty")}
    body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return body


def _refusal(fault: HTTPError) -> str:
    """What the server says is wrong."""
    try:
        told: str = json.loads(fault.read())["error"]["message"]
        return told
    except (ValueError, KeyError, TypeError):
        return f"the server answers {fault.code} {fault.reason}"
