"""Checks every byte of a cache directory against its checksums, and every reference. Moves and deletes nothing.

Arrays are read in small pieces: no file, whatever it says, makes this allocate more than that and its tokens.
"""
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from typing import Literal

from ds4mlx.sessions.container import Container
from ds4mlx.sessions.directory import CacheDirectory
from ds4mlx.sessions.format import read_alias, read_head, read_tokens
from ds4mlx.sessions.identity import chain_hashes, head_name, known_name, parse_name, segment_file
from ds4mlx.sessions.integrity import Corrupt, Foreign, Incomplete, fill
from ds4mlx.sessions.segment import read_segment

PIECE_BYTES = 1 << 20

Verdict = Literal["sound", "bad", "foreign"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one file. foreign: of another version, or it may not be read. `why`: "" for a sound one."""
    name: str
    kind: Literal["head", "alias", "segment"]
    nbytes: int
    verdict: Verdict
    why: str = ""


def verify(directory: CacheDirectory) -> Iterator[Checked]:
    """One result a file, segments first. A file that another process deletes meanwhile has none."""
    return _Verifier(directory).run()


@dataclass(slots=True)
class _Verifier:
    directory: CacheDirectory
    seen: dict[str, Checked | None] = field(default_factory=dict)   # by file; None: gone

    def run(self) -> Iterator[Checked]:
        names = [found.name for found in self.directory.files() if parse_name(found.name)]
        for suffix in (".kvs", ".kvm", ".kva"):
            for name in sorted(name for name in names if name.endswith(suffix)):
                if (checked := self.check(name)) is not None:
                    yield checked

    def check(self, name: str) -> Checked | None:
        if name not in self.seen:
            self.seen[name] = self._check(name)
        return self.seen[name]

    def _check(self, name: str) -> Checked | None:
        kind = known_name(name).kind
        nbytes = 0
        try:
            file, found = self.directory.open(name)
            nbytes = found.nbytes
            with file:
                {"segment": self._segment, "head": self._head, "alias": self._alias}[kind](name, file, nbytes)
        except FileNotFoundError:
            return None
        except (Incomplete, Corrupt) as fault:
            gone = self.directory.look(name) is None    # then what it refers to may be gone too, and that is no fault
            return None if gone else Checked(name, kind, nbytes, "bad", str(fault))
        except (Foreign, OSError) as fault:
            return Checked(name, kind, nbytes, "foreign", str(fault))
        return Checked(name, kind, nbytes, "sound")

    def _segment(self, name: str, file: FileIO, size: int) -> None:
        stored = read_segment(file, size)
        if segment_file(stored.segment.name) != name:
            raise Corrupt(f"it is segment {stored.segment.name:.32} under another name")
        _check_data(file, stored.data_at, stored.container)

    def _head(self, name: str, file: FileIO, size: int) -> None:
        stored = read_head(file, size)
        head = stored.head
        if hashlib.sha1(head.key, usedforsecurity=False).hexdigest() != known_name(name).stem:
            raise Corrupt("its name is not the SHA-1 of its key")
        if head_name(head.key, head.identity) != name:
            raise Corrupt("its name is that of another model")
        _check_data(file, stored.data_at, stored.container)
        if chain_hashes(head.identity, read_tokens(file, stored))[:len(head.segments)] != head.segments:
            raise Corrupt("its segments are of other tokens")
        for segment in head.segments:
            checked = self.check(segment_file(segment))
            if checked is None or checked.verdict != "sound":
                raise Corrupt(f"its segment {segment} is {checked.verdict if checked else 'missing'}")
        if stored.tool_map_fault:
            raise Corrupt(f"the state is sound, but {stored.tool_map_fault}")

    def _alias(self, name: str, file: FileIO, size: int) -> None:
        alias = read_alias(file, size)
        if hashlib.sha1(alias.key, usedforsecurity=False).hexdigest() != known_name(name).stem:
            raise Corrupt("its name is not the SHA-1 of its key")
        if self.directory.look(alias.target) is None:
            raise Corrupt(f"its state {alias.target} is missing")


def _check_data(file: FileIO, at: int, container: Container) -> None:
    """Raises Corrupt unless every array has its CRC."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    file.seek(at)
    for spec, crc in zip(container.arrays, container.crcs):
        left, running = spec.nbytes, 0
        while left:
            piece = buffer[:min(left, PIECE_BYTES)]
            fill(file, piece)
            running = zlib.crc32(piece, running)
            left -= len(piece)
        if running != crc:
            raise Corrupt(f"the CRC of {spec.name} is not the one in the JSON")

