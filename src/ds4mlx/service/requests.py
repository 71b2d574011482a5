"""What is told of a request while it waits, while it runs, and for a while after its end: numbers and names of ours."""
from dataclasses import dataclass, field
from typing import Literal

from ds4mlx.sessions.explain import Explanation, MemoryMiss
from ds4mlx.sessions.lookup import Api, Source

Stage = Literal["waiting", "beginning", "prefilling", "decoding", "ended"]
Kept = Literal["nothing", "memory", "shared", "disk"]


@dataclass(frozen=True, slots=True)
class Reused:
    """What a prompt went on from.

    tokens: of the prompt, that were not computed again; live: that the state it was compared with held; common: of
    them, that both begin with. slot: the other slot that the state is shared with, None for its own. because: in
    words, where less was reused than there was; else "". disk_miss: why no saved state was taken, or "".
    """
    kept: Kept
    source: Source
    tokens: int
    live: int
    common: int
    slot: int | None
    reason: MemoryMiss
    because: str
    disk_miss: str


def reused(told: Explanation) -> Reused:
    """An explanation in short."""
    kept: Kept = ("nothing" if not told.reused else "shared" if told.branched else
                  "disk" if told.source == "disk-text" else "memory")
    return Reused(kept, told.source, told.reused, told.live, told.common, told.beside if told.branched else None,
                  told.reason, told.because, told.disk_miss)


@dataclass(frozen=True, slots=True)
class Known:
    """A request. place: in the queue, 0 once it runs; prefilled: tokens of the prompt that are in the session; tokens:
    generated so far; slot and reused: None until they are known; tps: tokens a second; seconds: since it came, or all
    that it took; finish: how it ended; at: when this was so, in seconds of the monotonic clock."""
    id: str
    api: Api
    stage: Stage
    place: int
    prompt_tokens: int
    prefilled: int
    tokens: int
    slot: int | None
    reused: Reused | None
    prefill_tps: float
    decode_tps: float
    seconds: float
    finish: str = ""
    at: float = field(default=0.0, compare=False)
