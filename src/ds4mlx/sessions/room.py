"""Keeps the cache directory within its budget. Everything here is called with the directory's lock held."""
import logging
import math
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions import policy
from ds4mlx.sessions.directory import CacheDirectory, is_abandoned
from ds4mlx.sessions.identity import segment_file
from ds4mlx.sessions.index import Index

log = logging.getLogger(__name__)

SLACK = 1.01  # a file takes whole blocks, and the directory grows with its names


class NoRoom(CheckpointError):
    """The budget or the disk is too small for a save."""


@dataclass(slots=True)
class Room:
    """fixed_bytes: what a checkpoint of one token takes, see policy.score."""
    directory: CacheDirectory
    index: Index
    budget_bytes: int
    fixed_bytes: int
    evicted: Counter[str] = field(default_factory=Counter)     # heads, by why

    def make(self, need_bytes: int, *, keep: Collection[str] = (), keep_segments: Collection[str] = (),
             incoming: Collection[str] = ()) -> None:
        """Deletes what is worth least until `need_bytes` more fit. Raises NoRoom and deletes nothing if they cannot."""
        need = math.ceil(need_bytes * SLACK)
        if need > self.budget_bytes:
            raise NoRoom(f"{need} bytes are more than the budget of {self.budget_bytes}; raise --kv-disk-space-mb")
        if need > (free := self.directory.room_bytes()):
            raise NoRoom(f"the volume has {max(free, 0)} bytes to spare and {need} are needed; free some")
        excess = self.index.total_bytes() + need - self.budget_bytes
        if excess <= 0:
            return
        found = self._victims(excess, keep, keep_segments, incoming)
        if found.freed_bytes < excess:
            raise NoRoom(f"only {found.freed_bytes} of {excess} bytes could be evicted; raise --kv-disk-space-mb")
        self._delete_all(found.names, keep_segments, "disk-cache-full")

    def tidy(self) -> None:
        """At the start: deletes what crashes left behind and what a smaller budget does not hold."""
        now = time.time()
        for found in self.index.orphans(now):
            self.directory.delete(found.name)
        for name, alias in list(self.index.aliases.items()):
            if alias.target not in self.index.heads and alias.target not in self.index.foreign:
                self.directory.delete(name)
        self.sweep(now)
        self.index.refresh(force=True)
        if (excess := self.index.total_bytes() - self.budget_bytes) > 0:
            self._delete_all(self._victims(excess, (), (), ()).names, (), "budget-lowered")

    def sweep(self, now: float) -> None:
        """Deletes files that processes were writing when they ended."""
        for found in self.index.temporaries.values():
            if is_abandoned(found, now):
                self.directory.delete(found.name)

    def _victims(self, excess: int, keep: Collection[str], keep_segments: Collection[str],
                 incoming: Collection[str]) -> policy.Eviction:
        now = time.time()
        sizes = {name: found.nbytes for name, found in self.index.segments.items()}
        strays = [stray for stray in self.index.strays(now) if stray.name[:32] not in keep_segments]
        seen = policy.Directory(self.index.entries(), sizes, strays, self.fixed_bytes, keep, keep_segments, incoming)
        return policy.victims(seen, excess, now)

    def _delete_all(self, names: Collection[str], keep_segments: Collection[str], why: str) -> None:
        for name in names:
            if name.startswith("quarantine/"):
                self.directory.delete_quarantined(name.removeprefix("quarantine/"))
            elif name in self.index.heads:
                self.delete_head(name, keep_segments, why)
            else:
                self.directory.delete(name)
        self.index.refresh(force=True)

    def delete_head(self, name: str, keep_segments: Collection[str] = (), why: str = "unused") -> None:
        """The head first: without it the rest is found to be useless, the other way round it would be broken."""
        record = self.index.heads[name]
        log.info("kv cache evicted reason=%s tokens=%d hits=%d size=%d", why, record.head.tokens,
                 record.head.hits, record.found.nbytes)
        self.directory.delete(name)
        self.evicted[why] += 1
        for alias in self.index.aliases_of(name):
            self.directory.delete(alias.found.name)
        references = self.index.references()
        for segment in record.head.segments:
            if references[segment] == 1 and segment not in keep_segments:
                self.directory.delete(segment_file(segment))
        self.index.drop(name)
