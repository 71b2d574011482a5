"""How a cache file proves that it is whole: a CRC per section, and a footer that repeats the size of the file.

A length read from a file is compared with what the file can hold before anything is allocated by it.
"""
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import BinaryIO, ClassVar, Protocol, Self

import numpy as np

from ds4mlx.errors import CheckpointError

SLICE_BYTES = 64 << 20  # written at once, so that a full disk or a stop is noticed soon

Bytes = bytes | memoryview


class Incomplete(CheckpointError):
    """The file ends too early, or its footer or sizes say so. Quarantine it, parse no further."""


class Corrupt(CheckpointError):
    """The file is whole and its bytes are not what was written. Quarantine it."""


class Foreign(CheckpointError):
    """The file is of a version or kind that this reader does not know. Leave it in place."""


class Mismatch(CheckpointError):
    """The file is sound and another model's, layout's or context's. Leave it in place."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The last 32 bytes of every cache file. A CRC is 0 where its section is absent."""
    text_crc: int
    tools_crc: int
    json_crc: int
    file_bytes: int

    LAYOUT: ClassVar[Struct] = Struct("<4sIIIQII")
    MAGIC: ClassVar[bytes] = b"KVE1"

    def pack(self) -> bytes:
        body = self.LAYOUT.pack(self.MAGIC, self.text_crc, self.tools_crc, self.json_crc, self.file_bytes, 0, 0)[:-4]
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def unpack(cls, raw: bytes, size: int) -> Self:
        """`raw`: the last 32 of `size` bytes. Raises Incomplete when they are no footer of such a file."""
        magic, text, tools, json, file_bytes, reserved, crc = cls.LAYOUT.unpack(raw)
        if magic != cls.MAGIC or crc != zlib.crc32(raw[:-4]):
            raise Incomplete("the file has no valid footer, it was not written to its end; it will be set aside")
        if file_bytes != size or reserved:
            raise Incomplete(f"the footer tells of {file_bytes} bytes, the file has {size}; it will be set aside")
        return cls(text, tools, json, file_bytes)


class Sink(Protocol):
    """What a file is written to."""

    def write(self, data: memoryview, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Image:
    """A whole cache file as consecutive buffers. Arrays are referred to, not copied."""
    parts: tuple[Bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)

    def slices(self) -> Iterable[memoryview]:
        """The file in order, in pieces of at most SLICE_BYTES."""
        for part in self.parts:
            view = memoryview(part)
            for start in range(0, len(view), SLICE_BYTES):
                yield view[start:start + SLICE_BYTES]

    def write(self, out: Sink) -> None:
        """Writes all of it at the position of `out`. OSError of the file passes through."""
        for piece in self.slices():
            while piece:  # an unbuffered file may take less than it is given
                piece = piece[out.write(piece):]


def check_footer(src: BinaryIO, size: int, least: int = 84) -> Footer:
    """The footer of a file of `size` bytes: a cheap proof that it was written to its end. `least`: the smallest file.

    Raises Incomplete.
    """
    if size < least:
        raise Incomplete(f"the file has {size} bytes, the smallest has {least}; it will be set aside")
    return Footer.unpack(read_at(src, size - Footer.LAYOUT.size, Footer.LAYOUT.size), size)


def read_at(src: BinaryIO, at: int, count: int) -> bytes:
    """`count` bytes from `at`; the caller has compared both with the size of the file. Raises Incomplete at its end."""
    buffer = bytearray(count)
    src.seek(at)
    fill(src, memoryview(buffer))
    return bytes(buffer)


def fill(src: BinaryIO, view: memoryview) -> None:
    """Reads on from the position of `src` until `view` is full. Raises Incomplete when the file ends before."""
    while view:
        count = src.readinto(view)  # type: ignore[attr-defined]  # as every binary file has it
        if not count:
            raise Incomplete(f"the file ended {len(view)} bytes early, it is being cut; it will be set aside")
        view = view[count:]


def array_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, as they lie; writable when the array is."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data
