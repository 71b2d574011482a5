"""What a trace holds of a request, record by record."""
from dataclasses import dataclass
from typing import ClassVar

from ds4mlx.service.slot import Start
from ds4mlx.sessions.explain import Row
from ds4mlx.sessions.replay import Replays
from ds4mlx.text.escaping import escaped
from ds4mlx.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """type "request". time: seconds since 1970; raw: the body as it came; prompt: as it was rendered."""
    time: float
    id: str
    kind: str
    api: str
    model: str
    stream: bool
    tools: int
    think_mode: str
    prompt_tokens: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    raw: str
    prompt: str

    type: ClassVar[str] = "request"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a history, its text on one line."""
    id: int
    piece: str


@dataclass(frozen=True, slots=True)
class Differing:
    """One position of the live state and the prompt; None behind an end."""
    position: int
    live: Token | None
    prompt: Token | None


@dataclass(frozen=True, slots=True)
class Decided:
    """type "cache": what the request went on from. Lengths in tokens.

    live_*: of the slot's own state, or of the state of slot `beside`, if that has more in common with the prompt.
    donor: the slot that the cached tokens are shared with.
    """
    slot: int
    beside: int | None
    donor: int | None
    effective_prompt_tokens: int
    live_tokens_before: int
    live_prompt_common: int
    memory_token_reusable: bool
    memory_miss_reason: str
    tool_replay: dict[str, int]         # messages by where their calls came from; ids that are not known
    cache_source: str
    cached_tokens: int
    disk_cached_tokens: int
    disk_cache_file: str
    rejected: dict[str, str]            # file -> why it was not used
    first_difference: dict[str, str | int] | None  # block of the request, byte in it, what it was compared with
    because: str
    verdicts: tuple[tuple[str, str], ...]          # (source, outcome) in the order of attempts
    first_mismatch: tuple[Differing, ...]

    type: ClassVar[str] = "cache"


@dataclass(frozen=True, slots=True)
class Sampled:
    """type "token"."""
    id: int
    text: bytes     # as sampled: half characters are possible

    type: ClassVar[str] = "token"


@dataclass(frozen=True, slots=True)
class Happened:
    """type "event"."""
    event: str

    type: ClassVar[str] = "event"


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """type "finish": the answer as it was read."""
    finish: str
    error: str
    generated_tokens: int
    reasoning_tokens: int
    prefill_tps: float
    decode_tps: float
    seconds: float
    reasoning: str
    content: str
    tool_calls: tuple[Call, ...]

    type: ClassVar[str] = "finish"


Record = Asked | Decided | Sampled | Happened | Finished


def decided(start: Start, replays: Replays, tokenizer: Tokenizer) -> Decided:
    """What a slot did, in words of the trace."""
    told = start.explanation
    place = told.place and {"block": told.place.block, "byte": told.place.byte, "beside": told.place.beside}
    return Decided(
        slot=start.slot, beside=told.beside, donor=start.donor, effective_prompt_tokens=start.total,
        live_tokens_before=told.live, live_prompt_common=told.common,
        memory_token_reusable=told.common == told.live > 0, memory_miss_reason=told.reason,
        tool_replay={"mem": replays.mem, "disk": replays.disk, "canonical": replays.canonical,
                     "missing_ids": replays.missing_ids},
        cache_source=start.source, cached_tokens=start.reused,
        disk_cached_tokens=start.reused if start.source == "disk-text" else 0, disk_cache_file=start.file,
        rejected=dict(start.rejected), first_difference=place, because=told.because,
        verdicts=tuple((verdict.source, verdict.outcome) for verdict in told.verdicts),
        first_mismatch=tuple(_differing(row, tokenizer) for row in start.mismatch))


def _differing(row: Row, tokenizer: Tokenizer) -> Differing:
    def token(id: int | None) -> Token | None:
        return None if id is None else Token(id, _piece(id, tokenizer))

    return Differing(row.position, token(row.live), token(row.prompt))


def _piece(token: int, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.literal(token) or escaped(tokenizer.token_bytes(token))
    except ValueError:  # an id of a padded vocabulary
        return ""
