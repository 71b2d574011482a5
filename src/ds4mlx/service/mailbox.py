"""Events from the engine thread to one asyncio task: few wake-ups, bounded memory, and the engine never waits here."""
import asyncio
import threading
import time
from collections.abc import Iterable

from ds4mlx.chat.events import Event, ReasoningDelta, Recovered, TextDelta, ToolArgsDelta

WAKE_INTERVAL_S = 0.01     # a wake-up costs the engine thread a system call and the GIL
LIMIT_BYTES = 1 << 20
EVENT_BYTES = 64           # what an event weighs besides its text


class Mailbox:
    """`put` on the engine thread, `take` on the loop. The first events arrive at once, later ones every 10 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._bytes = 0
        self._armed = False              # a wake-up is on its way
        self._delivered_at = 0.0
        self._arrived = asyncio.Event()

    def put(self, events: Iterable[Event], *, last: bool = False) -> None:
        """Hand events over; `last` skips the wait for the next wake-up. A closed loop takes nothing any more."""
        with self._lock:
            for event in events:
                self._events.append(event)
                self._bytes += _weight(event)
            if not self._events or (self._armed and not last):
                return
            self._armed = True
        try:
            self._loop.call_soon_threadsafe(self._deliver if last else self._deliver_in_time)
        except RuntimeError:
            pass  # the loop was closed: nobody is left to read

    @property
    def full(self) -> bool:
        """Whether more than LIMIT_BYTES wait to be taken."""
        return self._bytes > LIMIT_BYTES

    async def take(self) -> list[Event]:
        """All events since the last call, in order, one at least; neighbouring deltas are joined."""
        await self._arrived.wait()
        with self._lock:
            events, self._events, self._bytes = self._events, [], 0
            self._arrived.clear()
        return joined(events)

    def _deliver_in_time(self) -> None:
        early_s = self._delivered_at + WAKE_INTERVAL_S - time.monotonic()
        if early_s > 0:
            self._loop.call_later(early_s, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            self._armed = False
            self._delivered_at = time.monotonic()
            if self._events:
                self._arrived.set()


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring deltas of one kind made one: a slow reader gets fewer and larger pieces."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case (TextDelta(), TextDelta()) | (ReasoningDelta(), ReasoningDelta()):
                result[-1] = type(event)(last.text + event.text)
            case ToolArgsDelta(index=before), ToolArgsDelta(index=after) if before == after:
                result[-1] = ToolArgsDelta(after, last.fragment + event.fragment)
            case _:
                result.append(event)
    return result


def _weight(event: Event) -> int:
    match event:
        case TextDelta(text) | ReasoningDelta(text) | Recovered(text) | ToolArgsDelta(fragment=text):
            return EVENT_BYTES + len(text)
    return EVENT_BYTES
