"""GET /stats and GET /metrics: what the server has done so far, in JSON and in Prometheus' text format. No text of
anybody's: labels are names of ours."""
import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ds4mlx.chat.messages import Json
from ds4mlx.server.errors import Line
from ds4mlx.service.metrics import BUCKETS_S, Counts, Durations, Statistics
from ds4mlx.service.service import Service

PREFIX = "ds4mlx_"
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


async def stats(request: Request) -> Response:
    now = await gather(request.app.state.service, request.app.state.began)
    return Line(as_json(now))


async def metrics(request: Request) -> Response:
    now = await gather(request.app.state.service, request.app.state.began)
    return PlainTextResponse("".join(exposition(now)), media_type=EXPOSITION)


routes = [Route("/stats", stats, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]


async def gather(service: Service, began: float) -> Statistics:
    """Looks at the cache directory on another thread; waits for no request."""
    health, store = service.health, service.scheduler.store
    kept = await asyncio.to_thread(store.stats) if store is not None else None
    return Statistics(health.state, round(time.monotonic() - began, 1), service.context, health.slots, health.active,
                      health.queued, service.scheduler.use, service.metrics.counts, kept,
                      service.scheduler.memory)


def as_json(now: Statistics) -> dict[str, Json]:
    counts = now.counts
    requests: dict[str, dict[str, Json]] = {}
    for (api, finish), n in counts.requests.items():
        requests.setdefault(api, {})[finish] = n
    return {
        "status": now.state, "uptime_s": now.uptime_s, "context_length": now.context, "slots": now.slots,
        "active": now.active, "queued": now.queued, "slot_use": [asdict(use) for use in now.use], "requests": requests,
        "errors": {str(status): n for status, n in counts.errors.items()},
        "cache_sources": dict(counts.sources),
        "tokens": {"prompt": dict(counts.prompt_tokens), "generated": counts.generated_tokens,
                   "reasoning": counts.reasoning_tokens},
        "tokens_per_second": {"prefill": round(counts.prefill_tps, 1), "decode": round(counts.decode_tps, 1)},
        "seconds": {name: {"count": took.count, "sum": round(took.sum_s, 3)} for name, took in _durations(counts)},
        "tool_replays": dict(counts.tool_replays), "recovered_tool_blocks": counts.recovered,
        "memory": asdict(now.memory) if now.memory else None,
        "kv_cache": {"enabled": now.store is not None, **(asdict(now.store) if now.store else {})}}


def _durations(counts: Counts) -> Iterator[tuple[str, Durations]]:
    yield "request", counts.request_s
    yield "queue", counts.queue_s
    yield "ttft", counts.first_token_s


def exposition(now: Statistics) -> Iterator[str]:
    """Prometheus' text format."""
    counts = now.counts
    yield from _family("requests_total", "counter", "Requests that ended, by API and how.",
                       (({"api": api, "finish": finish}, n) for (api, finish), n in sorted(counts.requests.items())))
    yield from _family("http_errors_total", "counter", "Requests answered with an error status.",
                       (({"status": str(status)}, n) for status, n in sorted(counts.errors.items())))
    for name, took in _durations(counts):
        yield from _histogram(f"{name}_seconds", f"Seconds of {SPANS[name]}.", took)
    yield from _single("queue_depth", "gauge", "Requests that wait.", now.queued)
    yield from _single("active_requests", "gauge", "Requests that are computed.", now.active)
    yield from _labelled("slot_tokens", "slot", "Tokens that each slot holds.",
                         {str(use.slot): use.tokens for use in now.use})
    yield from _labelled("prompt_tokens_total", "source", "Prompt tokens by where they came from.",
                         counts.prompt_tokens)
    yield from _labelled("cache_decisions_total", "source", "Prompts by what they went on from.", counts.sources)
    yield from _single("generated_tokens_total", "counter", "Tokens sampled.", counts.generated_tokens)
    yield from _single("reasoning_tokens_total", "counter", "Of them, reasoning.", counts.reasoning_tokens)
    yield from _single("prefill_tokens_per_second", "gauge", "Of the last request.", counts.prefill_tps)
    yield from _single("decode_tokens_per_second", "gauge", "Of the last request.", counts.decode_tps)
    yield from _labelled("tool_replay_total", "result", "Assistant turns with calls by how they were rendered.",
                         counts.tool_replays)
    yield from _single("dsml_recovered_total", "counter", "Malformed tool blocks given back as text.",
                       counts.recovered)
    yield from _single("context_limit_tokens", "gauge", "Most tokens of prompt and answer.", now.context)
    yield from _single("uptime_seconds", "gauge", "Since the start.", now.uptime_s)
    if now.memory is not None:
        yield from _single("mlx_active_bytes", "gauge", "Of the engine's arrays.", now.memory.active_bytes)
        yield from _single("mlx_peak_bytes", "gauge", "The most that they took.", now.memory.peak_bytes)
    yield from _cache(now)


SPANS = {"request": "a request from its arrival to its end", "queue": "waiting", "ttft": "waiting for the first token"}


def _cache(now: Statistics) -> Iterator[str]:
    store = now.store
    if store is None:
        return
    yield from _labelled("kv_disk_hits_total", "kind", "States read from disk, by the key that they were found by.",
                         store.hits_by_key)
    yield from _labelled("kv_disk_misses_total", "reason", "Prompts that went on from no state on disk.",
                         now.counts.disk_misses)
    yield from _single("kv_disk_saves_total", "counter", "States written to disk.", store.saved)
    yield from _labelled("kv_disk_errors_total", "op", "States that could not be read or written.",
                         {"load": store.rejected, "save": store.failed})
    yield from _labelled("kv_disk_evictions_total", "reason", "States deleted for room.", store.evicted_because)
    yield from _single("kv_disk_write_bytes_total", "counter", "Bytes written.", store.written_bytes)
    yield from _single("kv_disk_bytes", "gauge", "Bytes of all files.", store.total_bytes)
    yield from _single("kv_disk_budget_bytes", "gauge", "Bytes that they may take.", store.budget_bytes)
    yield from _labelled("kv_disk_files", "kind", "Files.",
                         {"state": store.heads, "segment": store.segments, "quarantined": store.quarantined})


Sample = tuple[Mapping[str, str], int | float]


def _family(name: str, kind: str, told: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {told}\n# TYPE {PREFIX}{name} {kind}\n"
    for labels, value in samples:
        yield _sample(name, labels, value)


def _sample(name: str, labels: Mapping[str, str], value: int | float) -> str:
    shown = ",".join(f'{label}="{named}"' for label, named in labels.items())
    return f"{PREFIX}{name}{{{shown}}} {value}\n" if shown else f"{PREFIX}{name} {value}\n"


def _single(name: str, kind: str, told: str, value: int | float) -> Iterator[str]:
    return _family(name, kind, told, [({}, value)])


def _labelled(name: str, label: str, told: str, values: Mapping[str, int]) -> Iterator[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    return _family(name, kind, told, (({label: named}, n) for named, n in sorted(values.items())))


def _histogram(name: str, told: str, took: Durations) -> Iterator[str]:
    yield from _family(name, "histogram", told, ())
    below = 0
    for bound, n in zip((*map(str, BUCKETS_S), "+Inf"), took.counts):
        below += n
        yield _sample(f"{name}_bucket", {"le": bound}, below)
    yield _sample(f"{name}_sum", {}, round(took.sum_s, 6))
    yield _sample(f"{name}_count", {}, took.count)
