"""An answer on its way to the client: as server-sent events with keepalives, or whole. Both notice a client that left.

Nothing here knows an API: a Writer turns events into that API's bytes.
"""
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ds4mlx.chat.events import Event, Finish
from ds4mlx.server.errors import engine_error
from ds4mlx.service.answer import Answer

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Events -> bytes of one API's stream."""

    def opening(self) -> bytes: ...             # at once, before the prompt is computed
    def write(self, event: Event) -> bytes: ...  # b"" for an event that the API does not show
    def keepalive(self) -> bytes: ...           # after a silence


class Batches(Protocol):
    """What a stream is sent from: an answer, or one whose first events were looked at."""

    async def batch(self) -> list[Event]: ...
    async def aclose(self) -> None: ...

    @property
    def place(self) -> int: ...                 # in the queue, 0 for one that does not wait


def frame(data: str) -> bytes:
    """One server-sent event. `data` holds no line break: JSON escapes them."""
    return f"data: {data}\n\n".encode()


class EventStream(Response):
    """Sends an answer as it comes. Ends it when the client leaves, or takes longer than `stall_s` for one write."""

    media_type = "text/event-stream"

    def __init__(self, answer: Batches, writer: Writer, headers: dict[str, str], *, keepalive_s: float,
                 stall_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.answer, self.writer, self.keepalive_s, self.stall_s = answer, writer, keepalive_s, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with _watching(receive) as gone:
                await self._send_all(send, gone)
        finally:
            await self.answer.aclose()

    async def _send_all(self, send: Send, gone: asyncio.Task[None]) -> None:
        await self._send(send, self.writer.opening())
        batch = asyncio.ensure_future(self.answer.batch())
        clock, sent_at = asyncio.get_running_loop().time, 0.0
        try:
            while not gone.done():
                body, sent_at = b"", sent_at or clock()
                left_s = max(0.0, sent_at + self.keepalive_s - clock()) if self.keepalive_s else None
                await asyncio.wait({batch, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if batch.done():
                    events = batch.result()
                    await self._send(send, body := b"".join(map(self.writer.write, events)))
                    if isinstance(events[-1], Finish):
                        await send({"type": "http.response.body", "body": b""})
                        return
                    batch = asyncio.ensure_future(self.answer.batch())
                # Progress comes more often than that, and the client sees nothing of it.
                if not body and not gone.done() and self.keepalive_s and clock() >= sent_at + self.keepalive_s:
                    await self._send(send, body := self._sign_of_life())
                sent_at = 0.0 if body else sent_at
        except TimeoutError:
            log.warning("a client took nothing for %.0f s; its request is cancelled", self.stall_s)
        finally:
            batch.cancel()

    def _sign_of_life(self) -> bytes:
        place = self.answer.place
        return (b": queued, place %d\n\n" % place if place else b"") + self.writer.keepalive()

    async def _send(self, send: Send, body: bytes) -> None:
        if body:
            async with asyncio.timeout(self.stall_s or None):
                await send({"type": "http.response.body", "body": body, "more_body": True})


async def whole(answer: Answer, receive: Receive) -> list[Event]:
    """All events of an answer. Raises ClientDisconnect when the client leaves first, BadRequest when it failed."""
    try:
        async with _watching(receive) as gone:
            reading = asyncio.ensure_future(_read_all(answer))
            try:
                await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise ClientDisconnect
                events = reading.result()
            finally:
                reading.cancel()
    finally:
        await answer.aclose()
    end = events[-1]
    assert isinstance(end, Finish)
    if end.reason == "error":
        raise engine_error(end.error or "the answer failed", end.error_code)
    return events


async def _read_all(answer: Answer) -> list[Event]:
    return [event async for event in answer]


@asynccontextmanager
async def _watching(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is done once the client has gone. The body must have been read."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        yield gone
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
