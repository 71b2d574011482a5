"""What a user asks about speed and use: moments of one request with the rates that follow, and counts over all."""
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from ds4mlx.chat.events import FinishReason, Usage
from ds4mlx.engine.protocol import MemoryUse
from ds4mlx.service.requests import Known
from ds4mlx.sessions.lookup import Api, Source
from ds4mlx.sessions.replay import Replays
from ds4mlx.sessions.store import StoreStats

# Upper bounds in seconds: from a cached turn to an hour of cold prefill.
BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)

RECENT = 40     # requests that are remembered after their end


@dataclass(slots=True)
class Timings:
    """Moments of one request, seconds of the monotonic clock; None: not reached."""
    queued: float = field(default_factory=time.monotonic)
    started: float | None = None      # left the queue
    prefilled: float | None = None    # the prompt is in the session
    first_token: float | None = None
    finished: float | None = None

    @property
    def total_s(self) -> float:
        return (self.finished or time.monotonic()) - self.queued

    def prefill_tps(self, tokens: int) -> float:
        """Computed prompt tokens per second; 0 when nothing was computed."""
        return _rate(tokens, self.started, self.prefilled)

    def decode_tps(self, tokens: int) -> float:
        """Tokens per second after the first one, so far or at the end."""
        return _rate(tokens - 1, self.first_token, self.finished or time.monotonic())


def _rate(tokens: int, start: float | None, end: float | None) -> float:
    if start is None or end is None or tokens <= 0 or end <= start:
        return 0.0
    return tokens / (end - start)


@dataclass(frozen=True, slots=True)
class Durations:
    """How often something took how long. counts: per bound of BUCKETS_S, not cumulated, then what took longer."""
    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plus(self, seconds: float) -> "Durations":
        at = bisect_left(BUCKETS_S, seconds)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1:])
        return Durations(counts, self.sum_s + seconds)


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that is over. computed_tokens: of its prompt; source None: it never left the queue."""
    api: Api
    reason: FinishReason
    usage: Usage
    timings: Timings
    source: Source | None
    computed_tokens: int
    replays: Replays
    disk_miss: str        # why no state on disk was gone on from; "" where one was, or none was needed
    recovered: int        # malformed tool blocks that became text


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals since the start. They hold numbers and names of ours, nothing that a client wrote."""
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (api, finish reason)
    errors: Counter[int] = field(default_factory=Counter)                # by HTTP status
    sources: Counter[str] = field(default_factory=Counter)               # where prompts began
    prompt_tokens: Counter[str] = field(default_factory=Counter)         # by source, those computed under "prefill"
    disk_misses: Counter[str] = field(default_factory=Counter)           # why no state on disk was gone on from
    tool_replays: Counter[str] = field(default_factory=Counter)
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    recovered: int = 0
    request_s: Durations = Durations()
    queue_s: Durations = Durations()
    first_token_s: Durations = Durations()
    prefill_tps: float = 0.0   # of the last request that computed any
    decode_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotUse:
    """What a slot is doing: tokens that it holds, and the phase of its run, "idle" without one."""
    slot: int
    tokens: int
    phase: str


@dataclass(frozen=True, slots=True)
class Statistics:
    """All numbers of one moment. store: None without states on disk."""
    state: str
    uptime_s: float
    context: int
    slots: int
    active: int
    queued: int
    use: tuple[SlotUse, ...]
    counts: Counts
    store: StoreStats | None
    memory: MemoryUse | None    # None until the engine is open


class Metrics:
    """Counts that the engine thread and the loop add to and any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()
        self._recent: deque[Known] = deque(maxlen=RECENT)

    @property
    def recent(self) -> list[Known]:
        """The requests that ended last, the latest first."""
        with self._lock:
            return [*reversed(self._recent)]

    @property
    def counts(self) -> Counts:
        """The counts of this moment, which do not change any more."""
        with self._lock:
            now = self._counts
            return replace(now, requests=now.requests.copy(), errors=now.errors.copy(), sources=now.sources.copy(),
                           prompt_tokens=now.prompt_tokens.copy(), disk_misses=now.disk_misses.copy(),
                           tool_replays=now.tool_replays.copy())

    def refused(self, status: int) -> None:
        """A request was answered with an error of this status."""
        with self._lock:
            self._counts.errors[status] += 1

    def ended(self, request: Ended, known: Known) -> None:
        usage, timings, replays = request.usage, request.timings, request.replays
        with self._lock:
            self._recent.append(known)
            now = self._counts
            now.requests[request.api, request.reason] += 1
            if request.source is not None:
                now.sources[request.source] += 1
                now.prompt_tokens[request.source] += usage.cached_tokens
                now.prompt_tokens["prefill"] += request.computed_tokens
                now.disk_misses.update([request.disk_miss] if request.disk_miss else ())
                now.tool_replays.update(mem=replays.mem, disk=replays.disk, canonical=replays.canonical,
                                        missing=replays.missing_ids)
            self._counts = replace(
                now, generated_tokens=now.generated_tokens + usage.completion_tokens,
                reasoning_tokens=now.reasoning_tokens + usage.reasoning_tokens,
                recovered=now.recovered + request.recovered,
                request_s=now.request_s.plus(timings.total_s),
                queue_s=_plus(now.queue_s, timings.queued, timings.started),
                first_token_s=_plus(now.first_token_s, timings.queued, timings.first_token),
                prefill_tps=timings.prefill_tps(request.computed_tokens) or now.prefill_tps,
                decode_tps=timings.decode_tps(usage.completion_tokens) or now.decode_tps)


def _plus(durations: Durations, start: float, end: float | None) -> Durations:
    return durations if end is None else durations.plus(end - start)
