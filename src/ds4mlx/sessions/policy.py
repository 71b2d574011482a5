"""When a state is worth saving, which saved one to try first, and which to delete. Pure functions: no files, no clock.

Sizes in tokens unless the name says bytes; times in seconds since 1970.
"""
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ds4mlx.sessions.header import KeyKind, Reason

HOUR_S = 3600.0
GAIN = 512                # a save has to cover this many more tokens than the last one of its lineage
ANCHOR_LEAD = 4096        # the aligned tail is worth a file of its own when it is this far behind the anchor
QUARANTINE_FILES, QUARANTINE_BYTES = 8, 1 << 30
RELOAD_PAUSE_S = 600.0
MOST_LINEAGES = 1000      # whose last restores are remembered
SMALLEST = 128            # at multiples of it no compressor holds a part of a group: a state is smallest there
WEIGHT: Mapping[Reason, float] = {"cold": 4, "agent-system": 4, "evict": 2, "shutdown": 2, "agent-session": 2}
LASTING: Collection[Reason] = ("cold", "agent-system")  # prefixes that many conversations share, used for weeks


@dataclass(frozen=True, slots=True)
class SaveRules:
    """The `--kv-cache-*` options that say where to save."""
    min_tokens: int = 512
    cold_max: int = 30000  # 0: no cold saves
    interval: int = 10000  # 0: no continued saves
    trim: int = 32
    align: int = 2048      # 0: none

    @property
    def step(self) -> int:
        """Tokens between continued saves: the interval, rounded up to whole segments."""
        return math.ceil(self.interval / self.align) * self.align if self.align else self.interval


@dataclass(frozen=True, slots=True)
class Boundary:
    """Save after this many tokens of the prompt."""
    tokens: int
    reason: Reason


def prefill_boundaries(rules: SaveRules, prompt: int, anchor: int | None, reused: int, chunk: int = 2048,
                       parted: int = 0) -> list[Boundary]:
    """Where a prefill of tokens [reused, prompt) stops to save, in order, each place once.

    anchor: tokens before the first task of a chat, None without one. Continued saves are at ends of chunks.
    parted: tokens up to which the known conversation that is most alike began in the same way.
    """
    found = {n: Boundary(n, "continued") for n in _continued(rules, prompt, reused, chunk)}
    found |= {n: Boundary(n, "cold") for n in (*_stable(rules, anchor, reused, parted),
                                               *_cold(rules, prompt, anchor, reused))}
    return [found[n] for n in sorted(found)]


def _stable(rules: SaveRules, anchor: int | None, reused: int, parted: int) -> Iterable[int]:
    """Ahead of what changes from conversation to conversation inside the system text, once it has been seen to."""
    place = parted - rules.trim
    place -= place % SMALLEST
    if anchor is not None and max(rules.min_tokens, reused + 1) <= place <= min(rules.cold_max, anchor - GAIN):
        yield place


def _cold(rules: SaveRules, prompt: int, anchor: int | None, reused: int) -> Iterable[int]:
    if reused and (anchor is None or reused >= anchor):
        return
    first = anchor if anchor is not None and rules.min_tokens <= anchor < prompt else None
    tail = prompt - rules.trim
    tail -= tail % rules.align if rules.align else 0
    if first is not None and first <= rules.cold_max:
        yield first
    if (first is None or tail - first >= ANCHOR_LEAD) and max(rules.min_tokens, reused + 1) <= tail <= rules.cold_max:
        yield tail


def _continued(rules: SaveRules, prompt: int, reused: int, chunk: int) -> Iterable[int]:
    if not rules.step:
        return
    at = reused
    while (multiple := (at // rules.step + 1) * rules.step) <= prompt:
        at = min(-(-multiple // chunk) * chunk, prompt)
        if at >= rules.min_tokens:
            yield at


def crosses(rules: SaveRules, before: int, frontier: int) -> bool:
    """Whether going from `before` to `frontier` reaches or passes a place of a continued save.

    `before` is where the state was restored, rewound or last asked about: an odd start skips no later save.
    """
    return bool(rules.step) and frontier // rules.step > before // rules.step and frontier >= rules.min_tokens


def why_not_save(rules: SaveRules, reason: Reason, frontier: int, covered: int) -> str | None:
    """None to save, else why not. covered: tokens of the longest checkpoint on disk that is a prefix of the state."""
    if frontier < rules.min_tokens:
        return f"fewer than {rules.min_tokens} tokens"
    if reason in ("evict", "continued") and covered and frontier - covered <= GAIN:
        return f"{covered} of them are on disk"
    if reason == "shutdown" and covered >= frontier:
        return "all of them are on disk"
    return None


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a checkpoint without reading it."""
    name: str                 # its file
    tokens: int
    tokens_sha1: str
    reason: Reason
    created: float
    own_bytes: int            # the head and its aliases; segments are shared and count apart
    key_kind: KeyKind = "token-text"
    quant_bits: int = 2
    hits: int = 0
    last_used: float = 0      # 0: never
    segments: tuple[str, ...] = ()
    ancestors: frozenset[str] = frozenset()  # entries whose tokens are a strict prefix of this one's


@dataclass(frozen=True, slots=True)
class Stray:
    """A file that counts and serves nobody: quarantined, of an unknown version, or a segment without a head."""
    name: str
    nbytes: int
    since: float


def candidate_rank(tokens: int, key_kind: KeyKind, same_quant: bool, text_bytes: int) -> tuple[int, bool, bool, int]:
    """Sorts candidates for a prompt, best first. text_bytes: length of the key, or alias, that matched."""
    return -tokens, key_kind != "token-text", not same_quant, -text_bytes


@dataclass(frozen=True, slots=True)
class Eviction:
    """What to delete, in order, and the bytes that frees."""
    names: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Directory:
    """All that eviction looks at.

    fixed_bytes: a checkpoint of one token. keep: names that may not go, pinned or a prefix of a request that waits.
    keep_segments: those a save in progress refers to. incoming: entries that are strict prefixes of that save.
    """
    entries: Sequence[Entry]
    segment_bytes: Mapping[str, int] = field(default_factory=dict)
    strays: Sequence[Stray] = ()
    fixed_bytes: int = 0
    keep: Collection[str] = ()
    keep_segments: Collection[str] = ()
    incoming: Collection[str] = ()


def victims(directory: Directory, excess_bytes: int, now: float) -> Eviction:
    """The least valuable files that free `excess_bytes`, or all that may go when they do not suffice.

    Strays first, the oldest first; then checkpoints by score, ties to the one used longer ago, then to the larger.
    """
    names: list[str] = []
    freed = 0
    for stray in sorted(directory.strays, key=lambda s: s.since):
        if freed >= excess_bytes:
            break
        if stray.name not in directory.keep:
            names.append(stray.name)
            freed += stray.nbytes
    left = _Evictable(directory, now)
    while freed < excess_bytes and (worst := left.worst()):
        names.append(worst.name)
        freed += left.remove(worst)
    return Eviction(tuple(names), freed)


def score(entry: Entry, file_bytes: float, fixed_bytes: int, now: float, *, fork: bool = False,
          waypoint: bool = False) -> float:
    """What a checkpoint is worth: (recent hits + 1) · tokens a byte · weight of its reason.

    file_bytes: its own bytes and its share of each segment. What every checkpoint costs is taken off, or short
    prefixes that everybody uses always lose. fork: several conversations go on from here. waypoint: a later
    checkpoint of the same conversation holds it.
    """
    density = entry.tokens / max(file_bytes - fixed_bytes, file_bytes / 8, 1)
    recent = recent_hits(entry, now)
    way = 0.05 + 0.45 * recent / (recent + 1) if waypoint and entry.reason == "continued" else 1
    return (recent + 1) * density * WEIGHT.get(entry.reason, 1) * (2 if fork else 1) * way


def recent_hits(entry: Entry, now: float) -> float:
    """Hits, halved every 6 hours since the last use, or every 7 days for lasting prefixes. No age is negative."""
    age = max(0.0, now - (entry.last_used or entry.created))
    hits = entry.hits * 2 ** (-age / (7 * 24 * HOUR_S if entry.reason in LASTING else 6 * HOUR_S))
    return hits if hits >= 0.01 else 0.0


def forks(entries: Sequence[Entry]) -> set[str]:
    """Entries that two others go on from in different ways."""
    children: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: e.tokens):
        for ancestor in entry.ancestors:
            children.setdefault(ancestor, []).append(entry)
    # Sorted by length, one conversation is a chain: each is a prefix of the next, or the same tokens by another key.
    return {name for name, below in children.items()
            if any(a.name not in b.ancestors and a.tokens_sha1 != b.tokens_sha1 for a, b in zip(below, below[1:]))}


def waypoints(entries: Sequence[Entry], incoming: Collection[str] = ()) -> set[str]:
    """Entries that a newer one, or the save to come, continues."""
    by_name = {entry.name: entry for entry in entries}
    held = {ancestor for entry in entries for ancestor in entry.ancestors
            if ancestor in by_name and by_name[ancestor].created <= entry.created}
    return held | set(incoming)


class _Evictable:
    """The checkpoints that may go. A deletion raises the share of its segments that others pay."""

    def __init__(self, directory: Directory, now: float) -> None:
        self._directory, self._now = directory, now
        self._forks = forks(directory.entries)
        self._waypoints = waypoints(directory.entries, directory.incoming)
        self._users: dict[str, list[Entry]] = {}
        for entry in directory.entries:
            for segment in entry.segments:
                self._users.setdefault(segment, []).append(entry)
        self._ranks = {entry.name: (self._rank(entry), entry) for entry in directory.entries
                       if entry.name not in directory.keep and entry.reason != "agent-session"}

    def worst(self) -> Entry | None:
        return min(self._ranks.values(), key=lambda ranked: ranked[0])[1] if self._ranks else None

    def remove(self, entry: Entry) -> int:
        """Bytes that go with it: itself and the segments it alone uses."""
        del self._ranks[entry.name]
        freed = entry.own_bytes
        sharing: dict[str, Entry] = {}
        for segment in entry.segments:
            users = self._users[segment]
            users.remove(entry)
            sharing |= {user.name: user for user in users}
            if not users and segment not in self._directory.keep_segments:
                freed += self._directory.segment_bytes.get(segment, 0)
        self._ranks |= {user.name: (self._rank(user), user) for user in sharing.values() if user.name in self._ranks}
        return freed

    def _rank(self, entry: Entry) -> tuple[float, float, float, str]:
        size = entry.own_bytes + sum(self._directory.segment_bytes.get(s, 0) / len(self._users[s])
                                     for s in entry.segments)
        worth = score(entry, size, self._directory.fixed_bytes, self._now, fork=entry.name in self._forks,
                      waypoint=entry.name in self._waypoints)
        return worth, entry.last_used or entry.created, -size, entry.name


def quarantine_excess(files: Sequence[Stray]) -> list[str]:
    """The oldest quarantined files beyond eight, or beyond 1 GiB."""
    kept = kept_bytes = 0
    out = []
    for file in sorted(files, key=lambda f: f.since, reverse=True):
        kept, kept_bytes = kept + 1, kept_bytes + file.nbytes
        if kept > QUARANTINE_FILES or kept_bytes > QUARANTINE_BYTES:
            out.append(file.name)
    return out


class ReloadGuard:
    """Files that are left alone for ten minutes: one prompt restored them twice and got no further, or they failed.

    A lineage is what identifies a prompt. A conversation that comes back with a longer one has got further, whichever
    slot it had: with more conversations than slots, each may restore one file for several turns until it is worth a
    save.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, tuple[str, int]] = {}   # lineage -> file and frontier restored last; the newest behind
        self._held: dict[int, bytes] = {}               # slot -> lineage that it restored a file for
        self._blocked: dict[tuple[bytes | None, str], tuple[float, str]] = {}  # (lineage or all, file) -> until, why

    def restored(self, slot: int, lineage: bytes, name: str, frontier: int, now: float) -> None:
        """A second restore without `continued` in between is a loop."""
        if self._last.pop(lineage, None) == (name, frontier):
            self._blocked[lineage, name] = now + RELOAD_PAUSE_S, "it was restored again without progress"
        self._last[lineage] = name, frontier
        self._held[slot] = lineage
        if len(self._last) > MOST_LINEAGES:
            del self._last[next(iter(self._last))]

    def continued(self, slot: int) -> None:
        """The slot went on from its state in memory."""
        if (lineage := self._held.pop(slot, None)) is not None:
            self._last.pop(lineage, None)

    def failed(self, name: str, why: str, now: float) -> None:
        """A file that is left in place could not be read, by anyone."""
        self._blocked[None, name] = now + RELOAD_PAUSE_S, why

    def blocked(self, lineage: bytes, now: float) -> dict[str, str]:
        """File -> why a prompt leaves it alone."""
        # A clock set back must not block for longer than the pause.
        self._blocked = {key: value for key, value in self._blocked.items() if now < value[0] <= now + RELOAD_PAUSE_S}
        return {name: why for (owner, name), (_, why) in self._blocked.items() if owner in (lineage, None)}
