"""Bytes that a launch moves, counted access by access.

Requested bytes are what threads ask for. Distinct bytes are whole sectors of 32, counted from the start of a buffer:
once a threadgroup, which is what reaches it if a threadgroup keeps what it has read, and once a launch, which is the
least that memory must deliver.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

SECTOR = 32  # bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes in one direction."""
    requested_bytes: int  # summed over threads
    group_bytes: int      # in distinct sectors of each threadgroup, summed over threadgroups
    distinct_bytes: int   # in distinct sectors of the launch


@dataclass(frozen=True, slots=True)
class BufferTraffic:
    """One buffer of a kernel; tables in the kernel's own constant memory are the buffer "(tables)"."""
    buffer_bytes: int
    reads: Moved
    writes: Moved


@dataclass(frozen=True, slots=True)
class Traffic:
    """One launch. Threadgroup memory has only requested bytes."""
    kernel: str
    threadgroups: int
    threads_per_threadgroup: int
    threadgroup_memory_bytes: int
    buffers: Mapping[str, BufferTraffic]
    threadgroup_read_bytes: int
    threadgroup_written_bytes: int

    @property
    def read_bytes(self) -> int:
        """Distinct bytes read, all buffers together."""
        return sum(buffer.reads.distinct_bytes for buffer in self.buffers.values())

    @property
    def written_bytes(self) -> int:
        """Distinct bytes written, all buffers together."""
        return sum(buffer.writes.distinct_bytes for buffer in self.buffers.values())


_listeners: list[list[Traffic]] = []


@contextmanager
def counting() -> Iterator[list[Traffic]]:
    """Within the block every launch is counted; the list has one record for each, in order."""
    launches: list[Traffic] = []
    _listeners.append(launches)
    try:
        yield launches
    finally:
        _listeners.remove(launches)


def wanted() -> bool:
    """Whether somebody counts."""
    return bool(_listeners)


def record(traffic: Traffic) -> None:
    """Tell everybody who counts."""
    for launches in _listeners:
        launches.append(traffic)
