"""What every API that computes does alike around its own reading and writing."""
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ds4mlx.chat.events import Event
from ds4mlx.chat.messages import Json
from ds4mlx.server.body import read_body
from ds4mlx.server.sse import Batches, EventStream, Writer, whole
from ds4mlx.service.answer import Answer
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Received

T = TypeVar("T")
SESSION_HEADERS = ("session-id", "x-session-id", "x-session-affinity")


def session_hints(request: Request) -> tuple[str, ...]:
    """What headers say to tell conversations apart."""
    return tuple(dict.fromkeys(hint for name in SESSION_HEADERS if (hint := request.headers.get(name))))


async def read(request: Request, reader: Callable[[dict[str, Json]], T]) -> T:
    """What `reader` makes of the body, which is kept where a trace wants it. Raises BadRequest."""
    service: Service = request.app.state.service
    return await read_body(request, service.settings.max_body_mb << 20, reader, keep=service.trace is not None)


def received(request: Request, model: str, stream: bool) -> Received | None:
    """The request as it came, for the trace; None without one."""
    service: Service = request.app.state.service
    return Received(model, stream, request.state.body) if service.trace is not None else None


async def reply(request: Request, answer: Answer, writer: Writer | None,
                write: Callable[[list[Event], dict[str, str]], Response], begun: Batches | None = None) -> Response:
    """The answer as a stream by `writer`, or, without one, as `write` makes it of all events and the headers.

    begun: the answer with its first events taken already. Raises what `whole` raises.
    """
    settings = request.app.state.service.settings
    headers = {"x-ds4mlx-effort": answer.lowered_effort} if answer.lowered_effort else {}
    if writer is not None:
        return EventStream(begun or answer, writer, headers, keepalive_s=settings.sse_keepalive_seconds,
                           stall_s=settings.send_stall_timeout)
    events = await whole(answer, request.receive)
    headers |= {"x-ds4mlx-cache-source": answer.source, "x-ds4mlx-cached-tokens": str(answer.cached_tokens),
                "x-ds4mlx-cache": answer.cache_line}
    return write(events, headers)
