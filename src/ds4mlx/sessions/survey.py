"""What a cache directory holds, for people: each state with its size, its use and its turn to be evicted.

No model is needed: what a server takes from its model is worked out from the files.
"""
import math
from dataclasses import dataclass

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions import policy
from ds4mlx.sessions.container import DTYPES
from ds4mlx.sessions.directory import CacheDirectory, Found
from ds4mlx.sessions.format import StoredHead, read_head
from ds4mlx.sessions.header import KeyKind, Reason
from ds4mlx.sessions.index import Index
from ds4mlx.sessions.known import Record
from ds4mlx.sessions.layout import is_append_only
from ds4mlx.sessions.store import HEAD_START_BYTES


@dataclass(frozen=True, slots=True)
class State:
    """One saved state. Times in seconds since 1970."""
    name: str
    key_kind: KeyKind
    reason: Reason
    tokens: int
    ctx: int                # limit of the server that saved it
    hits: int
    created: int
    last_used: int
    own_bytes: int          # its file and its aliases
    size_bytes: int         # with its share of segments
    text_bytes: int         # of its key
    segments: int
    shared_segments: int    # of them, those that other states refer to as well
    aliases: int
    tool_calls: int         # that can be repeated as they were sampled
    base_fp: str
    quant_bits: int
    evicted_after: int | None  # states that go before it when room is needed; None: it never goes by itself


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one kind."""
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """All of a directory. `total_bytes` is what counts towards a budget."""
    states: tuple[State, ...]   # the one used last first
    segments: Files
    aliases: Files
    quarantined: Files
    foreign: Files              # of other versions, or unreadable
    unfinished: Files           # being written, or left by a crash
    total_bytes: int


def survey(directory: CacheDirectory, index: Index, now: float) -> Survey:
    """A refreshed index as people read it."""
    references = index.references()
    turns = _turns(directory, index, now)
    states = [_state(index, record, references, turns.get(record.name)) for record in index.heads.values()]
    segments, aliases, quarantined, foreign, unfinished = [_files(found) for found in (
        list(index.segments.values()), [alias.found for alias in index.aliases.values()],
        list(index.quarantined.values()), list(index.foreign.values()), list(index.temporaries.values()))]
    return Survey(tuple(sorted(states, key=lambda s: (-s.last_used, s.name))), segments, aliases, quarantined,
                  foreign, unfinished, index.total_bytes())


def _turns(directory: CacheDirectory, index: Index, now: float) -> dict[str, int]:
    """State -> how many others a server would evict before it, as far as one can tell: its pins are not known here."""
    sizes = {name: found.nbytes for name, found in index.segments.items()}
    seen = policy.Directory(index.entries(), sizes, fixed_bytes=fixed_bytes(directory, index))
    names = policy.victims(seen, index.total_bytes() + 1, now).names
    return {name: turn for turn, name in enumerate(names)}


def _state(index: Index, record: Record, references: dict[str, int], turn: int | None) -> State:
    head, aliases = record.head, index.aliases_of(record.name)
    own = record.found.nbytes + sum(alias.found.nbytes for alias in aliases)
    share = sum(index.segments[name].nbytes / references[name] for name in head.segments if name in index.segments)
    return State(record.name, head.key_kind, head.reason, head.tokens, head.ctx, head.hits, head.created,
                 head.last_used or head.created, own, own + round(share), record.text_bytes, len(head.segments),
                 sum(references[name] > 1 for name in head.segments), len(aliases), len(record.call_ids),
                 head.identity.base_fp, head.identity.quant_bits, turn)


def _files(found: list[Found]) -> Files:
    return Files(len(found), sum(file.nbytes for file in found))


def fixed_bytes(directory: CacheDirectory, index: Index) -> int:
    """What a checkpoint of one token takes, see policy.score, by the state that was used last; 0 without one."""
    for record in sorted(index.heads.values(), key=lambda r: -r.head.last_used):
        try:
            file, found = directory.open(record.name)
            with file:
                return one_token_bytes(read_head(file, found.nbytes, tools=False)) + HEAD_START_BYTES
        except (OSError, CheckpointError):
            continue
    return 0


def one_token_bytes(stored: StoredHead) -> int:
    """Bytes of the arrays of a state of one token, by those of a longer state of the same model.

    It has one row of the window and none that are compressed. Of what a compressor has open, layers that compress 128
    tokens hold a row a token and the others a fixed number.
    """
    head = stored.head
    by_token = {f"L{layer}" for layer, rows in enumerate(head.counts.comp) if rows != head.tokens // 4}
    total = 0
    for spec in stored.container.arrays:
        layer, _, kind = spec.name.rpartition(".")
        if not spec.shape or is_append_only(spec.name):
            continue
        rows = 1 if kind in ("tokens", "raw") or layer in by_token else spec.shape[0]
        total += rows * math.prod(spec.shape[1:]) * DTYPES[spec.dtype].itemsize
    return total
