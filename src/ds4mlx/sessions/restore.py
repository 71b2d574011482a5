"""A head and its segments, read into the arrays of one whole state.

Ordinary reads, straight into place: nothing is mapped, nothing is held twice. Segments are read by several threads,
so that the disk works while checksums are computed.
"""
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.container import Arrays, check_arrays, read_arrays
from ds4mlx.sessions.directory import CacheDirectory, Found
from ds4mlx.sessions.format import Head, StoredHead, check_layout, read_head
from ds4mlx.sessions.identity import segment_file
from ds4mlx.sessions.integrity import Corrupt, Incomplete
from ds4mlx.sessions.layout import Layout, empty_arrays, head_views, segment_arrays
from ds4mlx.sessions.segment import read_segment

READERS = 4


class Vanished(CheckpointError):
    """Another process deleted the file meanwhile."""


class BadSegment(CheckpointError):
    """A segment is missing or bad. `found`: its file, None when it is missing."""

    def __init__(self, message: str, found: Found | None) -> None:
        super().__init__(message)
        self.found = found


@dataclass(frozen=True, slots=True)
class Restored:
    """A state as the engine takes it back. `arrays` holds every array whole, `tokens` among them."""
    head: Head
    arrays: Mapping[str, np.ndarray]

    @property
    def tokens(self) -> np.ndarray:
        return self.arrays["tokens"]


def restore(directory: CacheDirectory, name: str, key: bytes | None, layout: Layout, *,
            verify: bool = True) -> Restored:
    """The state of a head; with `key`, only of one whose own key is its beginning.

    Allocates what `layout` says of as many tokens, once the file has been found to hold just that. Raises Vanished,
    Incomplete, Corrupt, Foreign, Mismatch for the head, BadSegment for one of its segments, OSError.
    """
    try:
        file, found = directory.open(name)
    except FileNotFoundError:
        raise Vanished(f"{name} is gone") from None
    with file:
        stored = read_head(file, found.nbytes)
        if key is not None and not key.startswith(stored.head.key):
            raise Corrupt("its SHA-1 is that of the prompt's beginning, its text is not")
        check_layout(stored, layout)
        arrays = empty_arrays(layout(stored.head.tokens))
        spans = len(stored.head.segments)
        read_arrays(file, stored.data_at, stored.container, head_views(arrays, layout, spans), verify=verify)
    _check_values(arrays)
    _read_segments(directory, name, found, stored, arrays, layout, verify)
    return Restored(stored.head, arrays)


def _check_values(arrays: Mapping[str, np.ndarray]) -> None:
    logits = arrays["logits"]
    if not np.isfinite(logits).all():
        raise Corrupt("its logits are not finite")
    if len(arrays["tokens"]) and int(arrays["tokens"].max()) >= len(logits):
        raise Corrupt(f"it names token {int(arrays['tokens'].max())}, the vocabulary has {len(logits)}")


def _read_segments(directory: CacheDirectory, name: str, found: Found, stored: StoredHead,
                   arrays: Mapping[str, np.ndarray], layout: Layout, verify: bool) -> None:
    segments, held = stored.head.segments, segment_arrays(layout)
    with ThreadPoolExecutor(min(READERS, len(segments)) or 1, "kv-read") as pool:
        reads = [pool.submit(_read_segment, directory, segment, span, arrays, held, verify)
                 for span, segment in enumerate(segments)]
        try:
            for read in reads:
                read.result()
        except BadSegment as fault:
            now = directory.look(name)
            if fault.found is None and (now is None or now.inode != found.inode):
                raise Vanished(f"{name} is gone, with its segments") from None
            raise
        finally:
            for read in reads:
                read.cancel()


def _read_segment(directory: CacheDirectory, segment: str, span: int, arrays: Mapping[str, np.ndarray], held: Arrays,
                  verify: bool) -> None:
    """Into its place in `arrays`. held: what each segment holds."""
    into = {name: arrays[name][span * shape[0]:(span + 1) * shape[0]] for name, (shape, _) in held.items()}
    try:
        file, found = directory.open(segment_file(segment))
    except FileNotFoundError:
        raise BadSegment(f"segment {segment} is missing", None) from None
    with file:
        try:
            stored = read_segment(file, found.nbytes)
            if (stored.segment.name, stored.segment.span) != (segment, span):
                raise Corrupt(f"it holds span {stored.segment.span} of {stored.segment.name:.32}")
            check_arrays(stored.container, held)
            read_arrays(file, stored.data_at, stored.container, into, verify=verify)
        except (Incomplete, Corrupt) as fault:
            raise BadSegment(f"segment {segment}: {fault}", found) from fault
