"""Two requests of a client to a running server, over HTTP: does the tool call come back, is the beginning reused, and
would the client have waited so long."""
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from ds4mlx.chat.messages import Json
from ds4mlx.cli.wire_setup import Client, Endpoint
from ds4mlx.cli.wire_turns import TURNS, WORD, Body, Reply, Turns
from ds4mlx.errors import Ds4Error

REUSED = 0.9          # of the first prompt that the second request has to find again
SHORT_S = 10.0        # for answers that need no model
LONGEST_S = 600.0     # that a check waits for anything, however patient the client


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""
    what: str
    ok: bool
    told: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """A streamed answer. silence_s: the longest time without anything that this client takes for a sign of life."""
    events: list[Json]
    head_s: float
    silence_s: float


def find_server(url: str, key: str | None) -> Endpoint:
    """What the server at `url` says of itself. Raises Ds4Error when none answers, or not to this key."""
    status, answer = _get(url, "/v1/models", key)
    if status != 200:
        raise Ds4Error(f"{url}/v1/models answers {status}: {_message(answer)}")
    try:
        card = json.loads(answer)["data"][0]
        return Endpoint(url, card["id"], card["context_length"], card["top_provider"]["max_completion_tokens"], key)
    except (ValueError, LookupError, TypeError):
        raise Ds4Error(f"{url} is not a ds4mlx server: its model list has no context_length; give --url") from None


def is_served(server: Endpoint, path: str) -> bool:
    """Whether the server has this route: GET is not possible on it, but it is known."""
    return _get(server.url, path, server.key)[0] != 404


def check(client: Client, server: Endpoint) -> Iterator[Finding]:
    """The findings, each as soon as it is known."""
    if not is_served(server, client.path):
        yield Finding("API", False, f"POST {client.path} is not registered on this server yet; {client.name} needs it")
        return
    turns = TURNS[client.name]
    body = turns.first(server.model)
    silences: list[Transcript] = []
    try:
        silences.append(_ask(client, server, turns, body))
        first = turns.reply(silences[0].events)
        if (fault := _call_fault(first, turns)) is not None:
            yield Finding("tool round trip", False, fault)
            yield _patience(client, silences)
            return
        silences.append(_ask(client, server, turns, turns.second(body, first, f"{WORD}\n")))
        second = turns.reply(silences[1].events)
    except (Ds4Error, LookupError, TypeError, ValueError) as fault:
        told = fault if isinstance(fault, Ds4Error) else f"an answer is not in the shape of {client.path}: {fault!r}"
        yield Finding("tool round trip", False, str(told))
        return
    yield _round_trip(first, second)
    yield _cache(first, second)
    yield _patience(client, silences)


def _call_fault(reply: Reply, turns: Turns) -> str | None:
    """Why an answer is not the call that was asked for."""
    if not reply.ended:
        return "the first answer lacks its closing event"
    if not reply.calls:
        return f"the model answered without calling {turns.tool}; ask again, or ask another model"
    call = reply.calls[0]
    try:
        parsed = json.loads(call.arguments)
    except ValueError:
        parsed = None
    if call.name != turns.tool or not isinstance(parsed, dict) or not call.id:
        return f"the call is of {call.name!r} with {call.arguments[:80]!r}, need {turns.tool} with an object and an id"
    return None


def _round_trip(first: Reply, second: Reply) -> Finding:
    call = first.calls[0]
    if not second.ended or not (second.text or second.calls):
        return Finding("tool round trip", False, "the call was made, but its result was not answered")
    return Finding("tool round trip", True, f"{call.name} {call.arguments} called, its result answered")


def _cache(first: Reply, second: Reply) -> Finding:
    reused = f"request 2 reused {second.cached_tokens:,} of {second.prompt_tokens:,} prompt tokens"
    if second.cached_tokens >= REUSED * first.prompt_tokens > 0:
        return Finding("cache hit", True, reused)
    return Finding("cache hit", False, f"{reused}, need most of the {first.prompt_tokens:,} of request 1; "
                                       "the header x-ds4mlx-cache and the server's --trace say why")


def _patience(client: Client, silences: list[Transcript]) -> Finding:
    head = max(transcript.head_s for transcript in silences)
    silence = max(transcript.silence_s for transcript in silences)
    ok = head < (client.head_s or float("inf")) and silence < client.silence_s
    by = "as the setup tells it" if client.told else "its default"
    limit = f"of {client.head_s:,.0f} s" if client.head_s else "without limit"
    return Finding("time-outs", ok, f"head after {head:.1f} s {limit}, longest silence {silence:.1f} s of "
                                    f"{client.silence_s:,.0f} s ({by})")


# ---- HTTP

def _ask(client: Client, server: Endpoint, turns: Turns, body: Body) -> Transcript:
    """POST and read the stream to its end. Raises Ds4Error for an error status and for silence."""
    began = time.monotonic()
    connection = _connection(server.url, min(LONGEST_S, client.silence_s))
    with closing(connection):
        try:
            connection.request("POST", _path(server.url, client.path + turns.query()), json.dumps(body).encode(),
                               _headers(server.key) | {"content-type": "application/json"} | turns.headers())
            response = connection.getresponse()
            head_s = time.monotonic() - began
            if response.status != 200:
                raise Ds4Error(f"POST {client.path} answers {response.status}: {_message(response.read())}")
            events, silence_s = _read_events(response, client.counts_comments)
        except TimeoutError:
            raise Ds4Error(f"nothing came for {min(LONGEST_S, client.silence_s):g} s; {client.name} gives up") from None
        except (OSError, HTTPException) as fault:
            raise Ds4Error(f"the connection broke ({fault!r}); see the server's log") from None
    return Transcript(events, head_s, silence_s)


def _read_events(response: HTTPResponse, counts_comments: bool) -> tuple[list[Json], float]:
    """Data of the events, and the longest wait for a line that counts."""
    events: list[Json] = []
    longest, heard = 0.0, time.monotonic()
    for line in response:
        if not line.startswith(b"data: ") and not (counts_comments and line.strip()):
            continue
        longest, heard = max(longest, time.monotonic() - heard), time.monotonic()
        if line.startswith(b"data: "):
            data = line[6:].decode().strip()
            events.append(data if data == "[DONE]" else json.loads(data))
    return events, longest


def _get(url: str, path: str, key: str | None) -> tuple[int, bytes]:
    try:
        with closing(_connection(url, SHORT_S)) as connection:
            connection.request("GET", _path(url, path), headers=_headers(key))
            response = connection.getresponse()
            return response.status, response.read()
    except (OSError, HTTPException) as fault:
        raise Ds4Error(f"no server answers at {url} ({fault}); start ds4mlx serve, or give --url") from None


def _connection(url: str, timeout_s: float) -> HTTPConnection:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


def _path(url: str, path: str) -> str:
    return urlsplit(url).path + path


def _headers(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _message(answer: bytes) -> str:
    """What an error of any API says."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer[:200].decode("utf-8", "replace")
