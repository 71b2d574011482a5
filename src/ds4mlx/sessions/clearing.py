"""Makes a cache directory smaller, on request of its owner. Safe beside a server: it holds the directory's lock, and a
server that misses a file computes what was in it.
"""
import time
from dataclasses import dataclass

from ds4mlx.sessions.directory import CacheDirectory, is_abandoned
from ds4mlx.sessions.identity import parse_name
from ds4mlx.sessions.index import Index
from ds4mlx.sessions.room import Room
from ds4mlx.sessions.survey import fixed_bytes

ORDER = {"head": 0, "alias": 1, "segment": 2}   # a head without its segments would be broken, not useless


@dataclass(frozen=True, slots=True)
class Freed:
    """What was deleted, and what stays."""
    states: int
    nbytes: int
    states_left: int
    bytes_left: int


def prune(directory: CacheDirectory, index: Index, *, to_bytes: int | None = None,
          unused_since: float | None = None) -> Freed:
    """Deletes states that were last used before `unused_since`, then what is worth least until `to_bytes` are left, and
    rests of crashes. Sessions that were saved by hand stay. Raises LockBusy, OSError.
    """
    with directory.lock():
        index.refresh(force=True)
        before = len(index.heads), index.total_bytes()
        room = Room(directory, index, before[1] if to_bytes is None else to_bytes, fixed_bytes(directory, index))
        if unused_since is not None:
            _delete_unused(room, unused_since)
        room.tidy()
        return _freed(before, index)


def _delete_unused(room: Room, since: float) -> None:
    index = room.index
    for name, record in list(index.heads.items()):
        if (record.head.last_used or record.head.created) < since and record.head.reason != "agent-session":
            room.delete_head(name)
    for found in index.quarantined.values():
        if found.modified < since:
            room.directory.delete_quarantined(found.name)
    index.refresh(force=True)


def clear(directory: CacheDirectory, index: Index) -> Freed:
    """Deletes every file of the cache, of other versions and in quarantine too, but none that is being written.

    Raises LockBusy, OSError.
    """
    with directory.lock():
        index.refresh(force=True)
        before = len(index.heads), index.total_bytes()
        named = [(parsed, found.name) for found in directory.files() if (parsed := parse_name(found.name))]
        for _, name in sorted(named, key=lambda pair: ORDER[pair[0].kind]):
            directory.delete(name)
        for found in directory.quarantined():
            directory.delete_quarantined(found.name)
        for found in index.temporaries.values():
            if is_abandoned(found, time.time()):
                directory.delete(found.name)
        directory.sync()
        index.refresh(force=True)
        return _freed(before, index)


def _freed(before: tuple[int, int], index: Index) -> Freed:
    states, nbytes = before
    left = index.total_bytes()
    return Freed(states - len(index.heads), nbytes - left, len(index.heads), left)
