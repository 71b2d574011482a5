"""What is in the cache directory, kept up to date: heads, aliases, segments and who refers to them.

A head is read once, when its name is new or its file was replaced; a request then costs one pass over its key.
"""
import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions import policy
from ds4mlx.sessions.directory import CacheDirectory, Found, is_temporary
from ds4mlx.sessions.format import (
    Alias, StoredHead, check_layout, check_usable, read_alias, read_head, read_tokens)
from ds4mlx.sessions.identity import Identity, known_name, parse_name
from ds4mlx.sessions.integrity import Corrupt, Foreign, Incomplete, Mismatch, check_footer
from ds4mlx.sessions.known import AliasRecord, Known, Match, Record, prefix_digests, sha1_of, token_bytes
from ds4mlx.sessions.layout import Layout

log = logging.getLogger(__name__)

ORPHAN_S = 600.0
# A directory changed twice within one tick of the file system's clock looks changed once.
RACY_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Usable:
    """Which checkpoints may be loaded. ctx: the server's context limit."""
    identity: Identity
    layout: Layout
    ctx: int
    min_tokens: int = 512
    same_quant: bool = False

    def why_not(self, stored: StoredHead) -> str:
        """An empty text when it may."""
        try:
            check_usable(stored.head, self.identity, self.ctx, min_tokens=self.min_tokens, same_quant=self.same_quant)
            check_layout(stored, self.layout)
        except Mismatch as why:
            return str(why)
        return ""


class Index:
    """Not for several threads at once, but for `known`; its owner sees to that. Without `usable`, every sound head is
    usable."""

    def __init__(self, directory: CacheDirectory, usable: Usable | None = None) -> None:
        self._directory, self._usable = directory, usable
        self._seen_ns = self._listed_ns = 0
        self.heads: dict[str, Record] = {}
        self.aliases: dict[str, AliasRecord] = {}
        self.segments: dict[str, Found] = {}     # by name without suffix
        self.foreign: dict[str, Found] = {}
        self.temporaries: dict[str, Found] = {}
        self.quarantined: dict[str, Found] = {}
        self.call_ids: dict[str, str] = {}       # tool call -> head that holds its block
        self._prefixes: dict[str, dict[int, str]] = {}   # head -> SHA-1 of its first n tokens
        self._sound_segments: set[Found] = set()
        self.known = Known()                     # for any thread: all of the above, as the last change left it

    # ---- looking at the disk

    def refresh(self, *, force: bool = False) -> None:
        """Notices what other processes did. Reads only what is new; bad files go to quarantine. Raises OSError."""
        changed_ns, now_ns = self._directory.modified_ns(), time.time_ns()
        if not force and changed_ns == self._seen_ns and self._listed_ns - changed_ns > RACY_NS:
            return
        self._seen_ns, self._listed_ns = changed_ns, now_ns
        files = {found.name: found for found in self._directory.files()}
        self.temporaries = {name: found for name, found in files.items() if is_temporary(name)}
        self._forget_missing(files)
        for found in files.values():
            self._notice(found)
        self.quarantined = {found.name: found for found in self._directory.quarantined()}
        self._publish()

    def _publish(self) -> None:
        self.known = Known(dict(self.heads), dict(self.aliases), frozenset(self.segments), dict(self.call_ids))

    def _forget_missing(self, files: Mapping[str, Found]) -> None:
        for known in (self.heads, self.aliases):
            for name in [name for name, record in known.items() if files.get(name) != record.found]:
                self._forget(name)
        self.foreign = {name: found for name, found in self.foreign.items() if files.get(name) == found}
        self.segments = {parsed.stem: found for name, found in files.items()
                         if (parsed := parse_name(name)) and parsed.kind == "segment"}
        self._sound_segments &= set(self.segments.values())

    def _forget(self, name: str) -> None:
        self.aliases.pop(name, None)
        self._prefixes.pop(name, None)
        if record := self.heads.pop(name, None):
            for call_id in record.call_ids:
                if self.call_ids.get(call_id) == name:
                    del self.call_ids[call_id]

    def _notice(self, found: Found) -> None:
        parsed = parse_name(found.name)
        if parsed is None or parsed.kind == "segment" or found.name in self.heads or found.name in self.aliases \
                or found.name in self.foreign:
            return
        try:
            file, opened = self._directory.open(found.name)
            with file:
                if parsed.kind == "head":
                    self._add_head(opened, read_head(file, opened.nbytes))
                else:
                    self._add_alias(opened, read_alias(file, opened.nbytes))
        except FileNotFoundError:
            pass
        except (Foreign, OSError) as fault:  # what cannot be read is left alone until it changes
            log.info("kv cache rejected file=%s because %s", found.name, fault)
            self.foreign[found.name] = found
        except (Incomplete, Corrupt) as fault:
            self.set_aside(found, str(fault))

    def _add_head(self, found: Found, stored: StoredHead) -> None:
        head = stored.head
        _check_name(found.name, head.key)
        unusable = self._usable.why_not(stored) if self._usable else ""
        calls = tuple(call for block in head.tool_map for call in block.call_ids)
        self.heads[found.name] = Record(found, replace(head, key=b"", tool_map=()), len(head.key), stored.tokens_sha1,
                                        calls, unusable)
        self.call_ids |= {call: found.name for call in calls if not unusable}

    def _add_alias(self, found: Found, alias: Alias) -> None:
        _check_name(found.name, alias.key)
        self.aliases[found.name] = AliasRecord(found, len(alias.key), alias.key_kind, alias.target)

    def drop(self, name: str) -> None:
        """A head was deleted by this process, with its aliases."""
        for alias in self.aliases_of(name):
            self._forget(alias.found.name)
        self._forget(name)
        self._publish()

    def used(self, name: str, hits: int, now: int) -> None:
        """The counts in the file were changed in place by this process."""
        if record := self.heads.get(name):
            fresh = self._directory.look(name)
            if fresh and fresh.inode == record.found.inode:
                self.heads[name] = replace(record, found=fresh, head=replace(record.head, hits=hits, last_used=now))
                self._publish()

    def set_aside(self, found: Found, why: str) -> None:
        """Quarantines a bad file; the oldest in quarantine go when they are too many."""
        log.warning("kv cache rejected file=%s because %s", found.name, why)
        self._forget(found.name)
        self._publish()
        try:
            self._directory.set_aside(found)
            held = self._directory.quarantined()
            for name in policy.quarantine_excess([policy.Stray(f.name, f.nbytes, f.modified) for f in held]):
                self._directory.delete_quarantined(name)
            self.quarantined = {f.name: f for f in self._directory.quarantined()}
        except OSError as fault:
            log.warning("kv cache could not set aside file=%s: %s", found.name, fault)

    # ---- answers

    def matches(self, key: bytes) -> list[Match]:
        return self.known.matches(key)

    def covering(self, tokens: np.ndarray) -> list[Record]:
        return self.known.covering(tokens)

    def has_segment(self, name: str) -> bool:
        """Whether a segment is on disk, whole by its footer. A bad one goes to quarantine."""
        found = self.segments.get(name)
        if found is None or found in self._sound_segments:
            return found is not None
        try:
            file, opened = self._directory.open(found.name)
            with file:
                check_footer(file, opened.nbytes)
        except (OSError, Incomplete) as fault:
            if isinstance(fault, Incomplete):
                self.set_aside(found, str(fault))
            del self.segments[name]
            return False
        self._sound_segments.add(found)
        return True

    def total_bytes(self, except_for: Collection[str] = ()) -> int:
        """All that counts towards the budget, files that are being written by any process included."""
        return sum(found.nbytes for found in self._all() if found.name not in except_for)

    def _all(self) -> Iterable[Found]:
        for records in (self.heads.values(), self.aliases.values()):
            yield from (record.found for record in records)
        for files in (self.segments, self.foreign, self.temporaries, self.quarantined):
            yield from files.values()

    def references(self) -> dict[str, int]:
        """Segment -> number of heads that refer to it."""
        count: dict[str, int] = {}
        for record in self.heads.values():
            for segment in record.head.segments:
                count[segment] = count.get(segment, 0) + 1
        return count

    def orphans(self, now: float) -> list[Found]:
        """Segments without a head, older than a save can take. None while there are heads that cannot be read."""
        if any(known_name(name).kind == "head" for name in self.foreign):
            return []
        used = self.references()
        return [found for name, found in self.segments.items()
                if name not in used and now - found.modified > ORPHAN_S]

    def aliases_of(self, target: str) -> list[AliasRecord]:
        return [alias for alias in self.aliases.values() if alias.target == target]

    # ---- for eviction

    def strays(self, now: float) -> list[policy.Stray]:
        """What may go first: quarantined files by "quarantine/NAME", foreign ones, segments without a head."""
        held = [policy.Stray(f"quarantine/{f.name}", f.nbytes, f.modified) for f in self.quarantined.values()]
        return held + [policy.Stray(f.name, f.nbytes, f.modified) for f in (*self.foreign.values(), *self.orphans(now))]

    def entries(self) -> list[policy.Entry]:
        """What eviction has to know. Reads histories that were not compared yet."""
        for name in list(self.heads):
            self._compare(name)
        return [self._entry(record) for record in self.heads.values()]

    def note_tokens(self, name: str, tokens: np.ndarray) -> None:
        """Saves reading back the tokens of a head that was just written."""
        lengths = {4 * r.head.tokens for r in self.heads.values()}
        self._prefixes[name] = {n // 4: d for n, d in prefix_digests(token_bytes(tokens), lengths).items()}

    def _entry(self, record: Record) -> policy.Entry:
        head, digests = record.head, self._prefixes.get(record.name, {})
        ancestors = frozenset(r.name for r in self.heads.values() if r.head.tokens < head.tokens
                              and digests.get(r.head.tokens) == r.tokens_sha1)
        own = record.found.nbytes + sum(a.found.nbytes for a in self.aliases_of(record.name))
        return policy.Entry(record.name, head.tokens, record.tokens_sha1, head.reason, head.created, own, head.key_kind,
                            head.identity.quant_bits, head.hits, head.last_used, head.segments, ancestors)

    def _compare(self, name: str) -> None:
        """Hashes the beginnings of a history that other heads might be, reading it only when there are new ones."""
        record, known = self.heads[name], self._prefixes.setdefault(name, {})
        lengths = {r.head.tokens for r in self.heads.values() if r.head.tokens < record.head.tokens
                   and r.head.segments == record.head.segments[:len(r.head.segments)]} - known.keys()
        if not lengths:
            return
        try:
            file, opened = self._directory.open(name)
            with file:
                tokens = read_tokens(file, read_head(file, opened.nbytes, tools=False))
        except (OSError, CheckpointError):  # gone or bad: found out when it is wanted
            known |= dict.fromkeys(lengths, "")
            return
        known |= {n // 4: d for n, d in prefix_digests(token_bytes(tokens), {4 * n for n in lengths}).items()}


def _check_name(name: str, key: bytes) -> None:
    if sha1_of(name) != hashlib.sha1(key, usedforsecurity=False).hexdigest():
        raise Corrupt("its name is not the SHA-1 of its key")
