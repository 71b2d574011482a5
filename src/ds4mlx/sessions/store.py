"""The checkpoint directory as the service sees it: find, load, save, protect. Nothing here fails a request.

All of it may be called from any thread; saving happens on a thread of its own. While that works on the directory, whose
disk may hang, everything else goes by what was there before.
"""
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.directory import CacheDirectory, LockBusy
from ds4mlx.sessions.format import read_alias, read_head, usage_writes
from ds4mlx.sessions.header import KeyKind, Reason, read_key_start
from ds4mlx.sessions.identity import Identity, chain_hashes
from ds4mlx.sessions.index import Index, Usable
from ds4mlx.sessions.integrity import Corrupt, Incomplete
from ds4mlx.sessions.known import Known, Match
from ds4mlx.sessions.layout import Layout
from ds4mlx.sessions.policy import ReloadGuard, SaveRules, candidate_rank, why_not_save
from ds4mlx.sessions.restore import BadSegment, Restored, Vanished, restore
from ds4mlx.sessions.room import Room
from ds4mlx.sessions.saving import SaveJob, Saver, missing_spans
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.sessions.writer import Writer

log = logging.getLogger(__name__)

MOST_CANDIDATES = 3
MOST_COMPARED, COMPARED_BYTES = 12, 1 << 20   # keys that a prompt is compared with, and how much of each
HEAD_START_BYTES = 8192  # header, JSON and key of a short checkpoint


@dataclass(frozen=True, slots=True)
class StoreOptions:
    budget_bytes: int = 4096 << 20
    rules: SaveRules = SaveRules()
    same_quant: bool = False
    verify: Literal["full", "header"] = "full"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a prompt may go on from. text_bytes: how much of the prompt's key it stands for."""
    name: str
    tokens: int
    text_bytes: int
    alias: str = ""
    key_kind: KeyKind = "token-text"


@dataclass(frozen=True, slots=True)
class Lookup:
    """rejected: (file, why) of those that fit the prompt and may not be used."""
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What there is, and what this process did. saved_bytes: of the last save; written_bytes: of all."""
    heads: int
    usable: int
    segments: int
    total_bytes: int
    budget_bytes: int
    quarantined: int
    foreign: int
    hits: int
    rejected: int
    saved: int
    skipped: int
    failed: int
    evicted: int
    hits_by_key: Mapping[str, int]          # kinds of the keys that were found
    evicted_because: Mapping[str, int]
    saved_bytes: int
    written_bytes: int
    paused: bool


class Store:
    """An open cache directory.

    layout: the engine's arrays of a state of n tokens. ctx: the context limit that states are made under.
    Raises CheckpointError when the directory cannot be used: not private, not writable, not lockable.
    """

    def __init__(self, path: Path, identity: Identity, layout: Layout, ctx: int,
                 options: StoreOptions = StoreOptions(), *, directory: CacheDirectory | None = None) -> None:
        self.path, self.options, self._layout = path, options, layout
        self._directory = directory or CacheDirectory(path)
        self._mutex = threading.RLock()      # of the index; held while a save looks at the directory and makes room
        self._notes = threading.Lock()       # of pins, protections, guard and counts; never held for long
        self._usable = Usable(identity, layout, ctx, options.rules.min_tokens, options.same_quant)
        self._index = Index(self._directory, self._usable)
        fixed = sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype in layout(1).values())
        self._room = Room(self._directory, self._index, options.budget_bytes, fixed + HEAD_START_BYTES)
        self._pins: Counter[str] = Counter()
        self._protected: dict[int, bytes] = {}
        self._next_protection = 0
        self._guard = ReloadGuard()
        self._hits: Counter[str] = Counter()
        self._rejected = 0
        self._start()
        self._saver = Saver(self._directory, self._index, self._room, self._mutex, self._usable, self._kept)
        self._writer = Writer(self._saver.save)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-reader")
        self._stats = self._counted()

    def _start(self) -> None:
        try:
            with self._directory.lock(), self._mutex:
                self._index.refresh(force=True)
                self._room.tidy()
        except LockBusy as fault:
            log.warning("kv cache not tidied: %s", fault)
        except OSError as fault:
            self._directory.close()
            raise CheckpointError(f"{self._directory.path}: {fault.strerror}; give another --kv-disk-dir") from fault

    def close(self, wait_s: float = 30.0) -> bool:
        """Finishes what is queued. False when that took too long and was given up."""
        done = self._writer.close(wait_s)
        self._reader.shutdown()
        if done:
            self._directory.close()
        return done

    def flush(self, wait_s: float = 30.0) -> bool:
        return self._writer.flush(wait_s)

    # ---- reading

    def find(self, key: bytes) -> Lookup:
        """The checkpoints to try for a prompt with this key, best first."""
        known = self._look()
        if known is None:
            return Lookup()
        matches = known.matches(key)
        with self._notes:
            blocked = self._guard.blocked(_lineage(key), time.time())
        rejected = {m.record.name: m.record.unusable or blocked[m.record.name]
                    for m in matches if m.record.unusable or m.record.name in blocked}
        best: dict[str, Match] = {}
        for match in sorted(matches, key=self._rank):
            if match.record.name not in rejected:
                best.setdefault(match.record.name, match)
        found = [Candidate(m.record.name, m.record.head.tokens, m.text_bytes, m.alias, m.key_kind)
                 for m in best.values()]
        return Lookup(tuple(found[:MOST_CANDIDATES]), tuple(rejected.items()))

    def alike(self, key: bytes) -> dict[str, bytes]:
        """File -> the beginning of its key, of a few states used last: what a prompt may part from. Raises nothing."""
        known, found = self._look(), {}
        for name in (known.recent() if known else [])[:MOST_COMPARED]:
            try:
                file, opened = self._directory.open(name)
                with file:
                    found[name] = read_key_start(file, opened.nbytes, min(len(key), COMPARED_BYTES))
            except (OSError, CheckpointError):   # gone or bad: found out when it is wanted
                continue
        return found

    def _rank(self, match: Match) -> tuple[int, ...]:
        head = match.record.head
        same_quant = head.identity.quant_bits == self._usable.identity.quant_bits
        return candidate_rank(head.tokens, match.key_kind, same_quant, match.text_bytes)

    def _look(self) -> Known | None:
        """What is in the directory, or was before the save in progress; None when it cannot be read."""
        if self._mutex.acquire(blocking=False):
            try:
                if not self._refreshed():
                    return None
            finally:
                self._mutex.release()
        return self._index.known

    def _refreshed(self) -> bool:
        try:
            self._index.refresh()
        except OSError as fault:
            log.warning("kv cache cannot be read: %s", fault)
            return False
        return True

    def pin(self, name: str) -> None:
        """Keeps a file from being evicted by this process until `release`."""
        with self._notes:
            self._pins[name] += 1

    def release(self, name: str) -> None:
        with self._notes:
            self._pins[name] -= 1
            self._pins += Counter()  # drops what is no longer pinned

    def protect(self, key: bytes) -> int:
        """Keeps all prefixes of a waiting request from being evicted, until `unprotect` of the number returned."""
        with self._notes:
            self._next_protection += 1
            self._protected[self._next_protection] = key
            return self._next_protection

    def unprotect(self, number: int) -> None:
        with self._notes:
            self._protected.pop(number, None)

    def _kept(self) -> set[str]:
        with self._notes:
            pinned, keys = set(self._pins), list(self._protected.values())
        return pinned | {m.record.name for key in keys for m in self._index.matches(key)}

    def load(self, candidate: Candidate, key: bytes, slot: int = 0) -> Restored:
        """The state of a candidate, with a hit counted. Raises CheckpointError; the caller tries the next candidate.

        A bad file has been set aside by then, with its bad segment.
        """
        self.pin(candidate.name)
        try:
            started = time.perf_counter()
            if candidate.alias and not self._fits(candidate, key):
                raise Vanished(f"{candidate.alias} is no key of this prompt's any more")
            restored = restore(self._directory, candidate.name, None if candidate.alias else key, self._layout,
                               verify=self.options.verify == "full")
        except OSError as fault:
            self._reject(candidate.name, str(fault))
            raise CheckpointError(f"{candidate.name} cannot be read: {fault.strerror}; it is left alone") from fault
        except CheckpointError as fault:
            self._reject_bad(candidate.name, fault)
            raise
        finally:
            self.release(candidate.name)
        self._count_hit(candidate, restored, key, slot)
        log.info("kv cache hit text tokens=%d key=%s load=%.0f ms file=%s", candidate.tokens, candidate.name[:8],
                 1000 * (time.perf_counter() - started), candidate.name)
        return restored

    def start_loading(self, candidate: Candidate, key: bytes, slot: int = 0) -> "Future[Restored]":
        """`load` on a thread of its own, so that nobody waits for a disk."""
        return self._reader.submit(self.load, candidate, key, slot)

    def start_comparing(self, key: bytes) -> "Future[dict[str, bytes]]":
        """`alike` on that thread."""
        return self._reader.submit(self.alike, key)

    def _fits(self, candidate: Candidate, key: bytes) -> bool:
        """Whether the text of an alias, not only its SHA-1, is the beginning of `key`. A bad alias is set aside."""
        try:
            file, found = self._directory.open(candidate.alias)
        except FileNotFoundError:
            return False
        with file:
            try:
                alias = read_alias(file, found.nbytes)
            except (Incomplete, Corrupt) as fault:
                with self._mutex:
                    self._index.set_aside(found, str(fault))
                return False
        return alias.target == candidate.name and key.startswith(alias.key)

    def _reject_bad(self, name: str, fault: CheckpointError) -> None:
        if isinstance(fault, Vanished):
            return
        if isinstance(fault, BadSegment | Corrupt | Incomplete):
            if isinstance(fault, BadSegment) and fault.found is not None:
                with self._mutex:
                    self._index.set_aside(fault.found, str(fault))
            self.quarantine(name, str(fault))
        else:
            self._reject(name, str(fault))

    def _reject(self, name: str, why: str) -> None:
        with self._notes:
            self._guard.failed(name, why, time.time())
            self._rejected += 1
        log.warning("kv cache rejected file=%s because %s", name, why)

    def quarantine(self, name: str, why: str) -> None:
        """Sets a head aside: it is bad, or what the engine made of it was."""
        with self._notes:
            self._rejected += 1
        with self._mutex:
            if (found := self._directory.look(name)) is not None:
                self._index.set_aside(found, why)

    def _count_hit(self, candidate: Candidate, restored: Restored, key: bytes, slot: int) -> None:
        name, now = candidate.name, int(time.time())
        with self._notes:
            self._hits[candidate.key_kind] += 1
            self._guard.restored(slot, _lineage(key), name, len(restored.tokens), now)
        if not self._mutex.acquire(blocking=False):   # a hit not counted in the file is no harm
            return
        try:
            if (record := self._index.heads.get(name)) is not None:
                hits = record.head.hits + 1
                self._directory.patch(record.found, usage_writes(hits, now))
                self._index.used(name, hits, now)
        except OSError:
            return
        finally:
            self._mutex.release()

    def continued(self, slot: int) -> None:
        """A request went on from the slot's state in memory: restoring its file once more is no loop."""
        with self._notes:
            self._guard.continued(slot)

    def tool_block(self, call_id: str) -> ToolBlock | None:
        """The saved block of tool calls that has an id."""
        known = self._look()
        if known is None or (name := known.call_ids.get(call_id)) is None:
            return None
        try:
            file, found = self._directory.open(name)
            with file:
                blocks = read_head(file, found.nbytes).head.tool_map
        except (OSError, CheckpointError):
            return None
        return next((block for block in blocks if call_id in block.call_ids), None)

    # ---- saving

    def why_not_save(self, reason: Reason, tokens: np.ndarray, keys: Sequence[bytes] = ()) -> str | None:
        """None when a state is worth exporting, else why not. keys: those that the state has to be found by, each."""
        known = self._look()
        if known is None:
            return "the cache cannot be read"
        covering = {record.name: record.head.tokens for record in known.covering(tokens)}
        findable = [{match.record.name for match in known.matches(key)} for key in keys] or [set(covering)]
        covered = min(max((covering[name] for name in found & covering.keys()), default=0) for found in findable)
        return why_not_save(self.options.rules, reason, len(tokens), covered)

    def covered(self, tokens: np.ndarray) -> int:
        """How many of these tokens the longest saved state holds that begins them."""
        known = self._look()
        return max((record.head.tokens for record in known.covering(tokens)), default=0) if known else 0

    def missing_spans(self, tokens: np.ndarray) -> list[int]:
        """Spans whose rows have to be exported for a save."""
        if not self._mutex.acquire(blocking=False):
            held = self._index.known.segments
            names = chain_hashes(self._usable.identity, tokens)
            return [span for span, name in enumerate(names) if name not in held]
        try:
            self._refreshed()
            return missing_spans(self._index, self._usable, tokens)
        finally:
            self._mutex.release()

    def save(self, job: SaveJob, wait_s: float = 0.0) -> bool:
        """Queues a save. False when the writer is still busy after `wait_s`, or paused because the disk was full."""
        return self._writer.offer(job, wait_s)

    @property
    def free(self) -> bool:
        """Whether a save would be taken, or refused, at once. Never waits."""
        return self._writer.free

    @property
    def idle(self) -> bool:
        """Whether nothing is being saved. Never waits."""
        return self._writer.idle

    def stats(self) -> StoreStats:
        """As they are, or as they were before the save in progress."""
        if self._mutex.acquire(blocking=False):
            try:
                self._refreshed()
                self._stats = self._counted()
            finally:
                self._mutex.release()
        return self._stats

    def _counted(self) -> StoreStats:
        index, writer = self._index, self._writer
        usable = sum(not record.unusable for record in index.heads.values())
        return StoreStats(len(index.heads), usable, len(index.segments), index.total_bytes(),
                          self.options.budget_bytes, len(index.quarantined), len(index.foreign),
                          self._hits.total(), self._rejected, writer.saved, writer.skipped, writer.failed,
                          self._room.evicted.total(), dict(self._hits), dict(self._room.evicted),
                          writer.last.written_bytes if writer.last else 0, self._directory.written_bytes,
                          writer.paused)


def _lineage(key: bytes) -> bytes:
    """What a prompt with this key is known by."""
    return hashlib.sha1(key, usedforsecurity=False).digest()
