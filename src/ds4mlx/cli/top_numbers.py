"""What a running server says of itself, and what follows from two such readings."""
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from ds4mlx.errors import Ds4Error

if TYPE_CHECKING:
    from ds4mlx.chat.messages import Json

TIMEOUT_S = 5.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_BYTES = 1 << 22
_BUCKET = re.compile(r'ds4mlx_ttft_seconds_bucket\{le="([^"]+)"\} (\d+)')


@dataclass(frozen=True, slots=True)
class Slot:
    """tps: tokens a second since the reading before; None without one."""
    number: int
    phase: str
    tokens: int
    tps: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a server. `at`: seconds of the monotonic clock; sources: prompts, and prompt_tokens their tokens, by
    what they went on from, those computed under "prefill"; first_token: prompts whose answer began within so many
    seconds."""
    at: float
    status: str
    uptime_s: float
    context: int
    active: int
    queued: int
    slots: tuple[Slot, ...]
    requests: int
    errors: int
    generated: int
    sources: dict[str, int]
    prompt_tokens: dict[str, int]
    last_prefill_tps: float
    last_decode_tps: float
    first_token: tuple[tuple[float, int], ...]
    memory_bytes: int
    disk_bytes: int | None      # None without states on disk
    disk_budget_bytes: int

    @property
    def reused_share(self) -> float | None:
        """Of all prompt tokens, those that were not computed."""
        total = sum(self.prompt_tokens.values())
        return (total - self.prompt_tokens.get("prefill", 0)) / total if total else None

    def first_token_s(self, share: float) -> float | None:
        """Seconds within which that share of the answers began, by the bounds that the server counts in."""
        total = self.first_token[-1][1] if self.first_token else 0
        return next((bound for bound, count in self.first_token if total and count >= share * total), None)

    def tps(self, *phases: str) -> float:
        """Tokens a second of the slots in these phases."""
        return sum(slot.tps or 0.0 for slot in self.slots if slot.phase in phases)


def read(url: str, key: str | None, before: Reading | None = None) -> Reading:
    """Ask /stats and /metrics. Raises Ds4Error: nobody answers there, or not a server of ours."""
    answer = _get(f"{url}/stats", key)
    try:
        stats = json.loads(answer)
        return _reading(stats, tuple(_first_token(_get(f"{url}/metrics", key).decode("utf-8", "replace"))), before)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise Ds4Error(f"{url}/stats does not answer as ds4mlx serve does ({fault!r}); give the URL of one") from fault


def _get(url: str, key: str | None) -> bytes:
    request = Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    near = urlsplit(url).hostname in LOOPBACK
    try:
        with build_opener(*([ProxyHandler({})] if near else [])).open(request, timeout=TIMEOUT_S) as answer:
            return answer.read(MOST_BYTES)
    except HTTPError as fault:
        fault.close()
        hint = "give --api-key" if fault.code in (401, 403) else "give the URL of a ds4mlx server"
        raise Ds4Error(f"{url} answers {fault.code}; {hint}") from fault
    except URLError as fault:
        raise Ds4Error(f"{url}: {fault.reason}; is ds4mlx serve running there?") from fault
    except (OSError, HTTPException, ValueError) as fault:
        raise Ds4Error(f"{url}: {fault or type(fault).__name__}; is ds4mlx serve running there?") from fault


def _reading(stats: "dict[str, Json]", first_token: tuple[tuple[float, int], ...], before: Reading | None) -> Reading:
    now, tokens, disk = time.monotonic(), stats["tokens"], stats["kv_cache"]
    return Reading(
        at=now, status=str(stats["status"]), uptime_s=float(stats["uptime_s"]), context=int(stats["context_length"]),
        active=int(stats["active"]), queued=int(stats["queued"]), slots=tuple(_slots(stats, now, before)),
        requests=sum(n for finishes in stats["requests"].values() for n in finishes.values()),
        errors=sum(stats["errors"].values()), generated=int(tokens["generated"]),
        sources=dict(stats["cache_sources"]), prompt_tokens=dict(tokens["prompt"]),
        last_prefill_tps=float(stats["tokens_per_second"]["prefill"]),
        last_decode_tps=float(stats["tokens_per_second"]["decode"]), first_token=first_token,
        memory_bytes=int((stats["memory"] or {}).get("active_bytes", 0)),
        disk_bytes=int(disk["total_bytes"]) if disk["enabled"] else None,
        disk_budget_bytes=int(disk["budget_bytes"]) if disk["enabled"] else 0)


def _slots(stats: "dict[str, Json]", now: float, before: Reading | None) -> Iterator[Slot]:
    """A slot that holds fewer tokens than before, or does something else, began anew: no speed follows from that."""
    earlier = {(slot.number, slot.phase): slot.tokens for slot in before.slots} if before else {}
    for use in stats["slot_use"]:
        number, phase, tokens = int(use["slot"]), str(use["phase"]), int(use["tokens"])
        grown = tokens - earlier.get((number, phase), tokens + 1)
        tps = grown / max(1e-3, now - before.at) if before and grown >= 0 else None
        yield Slot(number, phase, tokens, tps)


def _first_token(metrics: str) -> Iterator[tuple[float, int]]:
    for bound, count in _BUCKET.findall(metrics):
        if bound != "+Inf":     # longer than an hour
            yield float(bound), int(count)
