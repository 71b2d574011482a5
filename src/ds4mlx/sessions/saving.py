"""Writes one checkpoint: the segments that are missing, then the head, then its aliases.

Nothing has its name before it is whole and on disk, and a head not before its segments. The directory is locked while
room is made and while the head gets its name, not while bytes are written.
"""
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import RLock

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.container import read_arrays
from ds4mlx.sessions.directory import CacheDirectory, Temporary
from ds4mlx.sessions.format import Alias, Head, alias_image, head_image, read_head
from ds4mlx.sessions.header import KeyKind, Reason
from ds4mlx.sessions.identity import alias_name, chain_hashes, head_name, segment_file
from ds4mlx.sessions.index import Index, Usable
from ds4mlx.sessions.integrity import Image
from ds4mlx.sessions.known import Record
from ds4mlx.sessions.layout import empty_arrays, head_arrays, row_counts
from ds4mlx.sessions.room import Room
from ds4mlx.sessions.segment import Segment, segment_image
from ds4mlx.sessions.toolmap import ToolBlock


class Skipped(CheckpointError):
    """There is no need, or no way, to save this."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A state to save. `arrays`: what a head holds when all full spans lie in segments, tokens first.

    rows: of the spans that were missing on disk when it was exported, by span. aliases: further keys of the state.
    blocks: sampled tool calls of its history.
    """
    key: bytes
    key_kind: KeyKind
    reason: Reason
    arrays: Mapping[str, np.ndarray]
    rows: Mapping[int, Mapping[str, np.ndarray]]
    aliases: tuple[tuple[bytes, KeyKind], ...] = ()
    blocks: tuple[ToolBlock, ...] = ()

    @property
    def tokens(self) -> np.ndarray:
        return self.arrays["tokens"]


@dataclass(frozen=True, slots=True)
class Saved:
    name: str
    written_bytes: int
    segments: int       # written, not only referred to


@dataclass(frozen=True, slots=True)
class _Plan:
    name: str
    head: Image | None              # None: on disk already
    segments: Mapping[str, Image]   # exported ones, whether or not they turn out to be missing
    aliases: Mapping[str, Image]
    uses: tuple[str, ...]           # segments that the head refers to


@dataclass(frozen=True, slots=True)
class Saver:
    """What saving needs. keep: names that must not be evicted at this moment. `index` is used under `mutex`."""
    directory: CacheDirectory
    index: Index
    room: Room
    mutex: RLock
    usable: Usable
    keep: Callable[[], Collection[str]]

    def save(self, job: SaveJob) -> Saved:
        """Raises Skipped, NoRoom, LockBusy, OSError; what was on disk before is then as it was, but for evictions."""
        before = self.directory.written_bytes
        plan = self._plan(job)
        with ExitStack() as undo:
            missing, reserved = self._reserve(plan, job, undo)
            for segment in missing:
                self._write(plan.segments[segment], undo).publish(segment_file(segment))
                if reserved:
                    reserved.reserve(sum(plan.segments[s].nbytes for s in missing[missing.index(segment) + 1:])
                                     + _bytes(plan.head))
            if missing:
                self.directory.sync()
            if plan.head and reserved:
                reserved.fill(plan.head)
            aliases = {name: self._write(image, undo) for name, image in plan.aliases.items()}
            self._publish(plan, reserved if plan.head else None, aliases)
        with self.mutex:
            self.index.refresh(force=True)
            self.index.note_tokens(plan.name, job.tokens)
        return Saved(plan.name, self.directory.written_bytes - before, len(missing))

    def _plan(self, job: SaveJob) -> _Plan:
        """Everything that can be computed before the directory is locked, checksums above all."""
        identity, name = self.usable.identity, head_name(job.key, self.usable.identity)
        with self.mutex:
            self.index.refresh()
            present = self.index.heads.get(name)
            if name in self.index.foreign:
                raise Skipped("its name belongs to a file of another version")
            aliases = {file: image for file, image in self._aliases(job, name).items()
                       if file not in self.index.aliases or self.index.aliases[file].target != name}
        if present and not present.unusable:
            again = self._with_blocks(present, job.blocks)
            if again is None and not aliases:
                raise Skipped("it is on disk")
            return _Plan(name, again, {}, aliases, present.head.segments)
        uses = chain_hashes(identity, job.tokens)
        count = len(job.tokens)
        head = Head(job.key, job.key_kind, job.reason, count, self.usable.ctx, identity,
                    row_counts(self.usable.layout(count)), uses, job.blocks)
        segments = {uses[span]: segment_image(Segment(uses[span], span, identity), rows)
                    for span, rows in job.rows.items()}
        return _Plan(name, head_image(head, job.arrays), segments, aliases, uses)

    def _aliases(self, job: SaveJob, target: str) -> dict[str, Image]:
        identity, count = self.usable.identity, len(job.tokens)
        return {alias_name(key, identity): alias_image(Alias(key, kind, target, job.reason, count, self.usable.ctx,
                                                             identity.quant_bits))
                for key, kind in job.aliases if key != job.key}

    def _with_blocks(self, present: Record, blocks: Collection[ToolBlock]) -> Image | None:
        """The head on disk with further tool blocks, to be written anew; None when it has them all."""
        added = [block for block in blocks if not set(block.call_ids) <= set(present.call_ids)]
        if not added:
            return None
        file, found = self.directory.open(present.name)
        with file:
            stored = read_head(file, found.nbytes)
            arrays = empty_arrays(head_arrays(self.usable.layout, stored.head.tokens, len(stored.head.segments)))
            read_arrays(file, stored.data_at, stored.container, arrays)
        return head_image(replace(stored.head, tool_map=(*stored.head.tool_map, *added)), arrays)

    def _reserve(self, plan: _Plan, job: SaveJob, undo: ExitStack) -> tuple[list[str], Temporary | None]:
        """Makes room, and claims it by a file of that size. Returns the segments to write, and the head's file."""
        with self.directory.lock(), self.mutex:
            self.index.refresh(force=True)
            self.room.sweep(time.time())
            missing = [segment for segment in plan.uses if not self.index.has_segment(segment)]
            if lost := [segment for segment in missing if segment not in plan.segments]:
                raise Skipped(f"{len(lost)} of its segments are no longer on disk")
            need = sum(plan.segments[s].nbytes for s in missing) + _bytes(plan.head)
            incoming = {r.name for r in self.index.covering(job.tokens) if r.head.tokens < len(job.tokens)}
            self.room.make(need + sum(map(_bytes, plan.aliases.values())), keep={*self.keep(), plan.name},
                           keep_segments=plan.uses, incoming=incoming)
            if plan.head is None:
                return [], None
            return missing, self._temporary(need, undo)

    def _temporary(self, reserve_bytes: int, undo: ExitStack) -> Temporary:
        temporary = self.directory.temporary(reserve_bytes)
        undo.callback(temporary.discard)
        return temporary

    def _write(self, image: Image, undo: ExitStack) -> Temporary:
        temporary = self._temporary(0, undo)
        temporary.fill(image)
        return temporary

    def _publish(self, plan: _Plan, head: Temporary | None, aliases: Mapping[str, Temporary]) -> None:
        """Under the lock nobody deletes segments, so that a head whose segments are there keeps them."""
        with self.directory.lock():
            if any(self.directory.look(segment_file(segment)) is None for segment in plan.uses):
                raise Skipped("another process evicted one of its segments")
            if head:
                head.publish(plan.name)
                self.directory.sync()
            elif self.directory.look(plan.name) is None:
                raise Skipped("another process evicted it")
            for name, temporary in aliases.items():
                temporary.publish(name)
            if aliases:
                self.directory.sync()


def missing_spans(index: Index, usable: Usable, tokens: np.ndarray) -> list[int]:
    """Full spans of `tokens` that have no segment on disk."""
    names = chain_hashes(usable.identity, tokens)
    return [span for span, name in enumerate(names) if not index.has_segment(name)]


def _bytes(image: Image | None) -> int:
    return image.nbytes if image else 0
