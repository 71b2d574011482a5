"""A GGUF file as names: metadata and tensor directory read once, tensor bytes mapped and never copied.

Layout, little-endian: "GGUF", u32 version, u64 tensors, u64 keys; keys; directory; padding to the alignment; data.
Everything is checked here that needs no knowledge of a model: a file that opens has every byte range inside it.
"""
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Self

import numpy as np

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.blocks import BY_ID, row_bytes

Value = int | float | bool | str | list[str] | np.ndarray

MAGIC, VERSION = b"GGUF", 3
STRING, ARRAY = 8, 9
SCALARS: dict[int, np.dtype] = {type_id: np.dtype(code) for type_id, code in (
    (0, "u1"), (1, "i1"), (2, "<u2"), (3, "<i2"), (4, "<u4"), (5, "<i4"), (6, "<f4"), (7, "?"),
    (10, "<u8"), (11, "<i8"), (12, "<f8"))}
DEFAULT_ALIGNMENT = 32

# A Flash header is 5.3 MB with 60 keys and 1328 tensors. The limits bound time and memory on a hostile file: as strings
# of two characters, or as text with one emoji in it, a header takes 7 times its size.
MAX_HEADER_BYTES = 16 << 20
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One directory entry."""
    name: str
    shape: tuple[int, ...]  # row-major: the slowest axis first, the reverse of the file's order
    kind: str               # "F32", "Q2_K", ...; "type 23" if it has no block layout here
    offset: int             # from the start of the file, bytes
    nbytes: int             # 0 if the kind has no block layout


class GGUF:
    """An open model file; also a context manager. `map` is the mapping that every raw view lives in.

    A view keeps the mapping alive after `close`; the file must not shrink while it is mapped.
    """

    __slots__ = ("path", "map", "metadata", "tensors", "_bytes")

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path, self.map = path, mapping
        self._bytes = np.frombuffer(mapping, np.uint8)
        cursor = _Cursor(path, mapping)
        tensor_count, key_count = _read_counts(cursor)
        values = _read_metadata(cursor, key_count)
        self.metadata: Mapping[str, Value] = _Metadata(path, mapping, values)
        self.tensors: Mapping[str, TensorInfo] = _read_directory(cursor, tensor_count, _alignment(cursor, values))
        _refuse_overlaps(cursor, list(self.tensors.values()))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map `path` and read its header. Raises ModelFileError for anything but an intact GGUF file."""
        path = Path(path)
        try:
            with open(path, "rb", opener=_open_regular) as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise ModelFileError(f"{path}: the file is empty; it needs to be downloaded again")
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: no such file; give the path of a GGUF model") from None
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot be read ({error}); give the path of a GGUF model") from None
        return cls(path, mapping)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's blocks: read-only u8 [*shape[:-1], row bytes] in the mapping. Raises ModelFileError."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: no tensor {name}; the file is not a model of this family")
        if info.nbytes == 0:
            raise ModelFileError(f"{self.path}: tensor {name} is of {info.kind}, which is not supported")
        return self._bytes[info.offset:info.offset + info.nbytes].reshape(*info.shape[:-1], -1)

    def warm(self) -> None:
        """Read the whole file into memory, from its beginning to its end, by a look at every page of the mapping."""
        self._bytes[::mmap.PAGESIZE].max()

    @contextmanager
    def scattered(self) -> Iterator[None]:
        """Inside, reads do not bring in their surroundings: for a few bytes here and there in a large file.

        Hashing both ends of Flash's 1328 tensors on a cold file took 10 s with a read-ahead of 8 MiB, 0.02 s without.
        """
        self._advise("MADV_RANDOM")
        try:
            yield
        finally:
            self._advise("MADV_NORMAL")

    def _advise(self, advice: str) -> None:
        if hasattr(mmap, advice):  # not on every system
            self.map.madvise(getattr(mmap, advice))

    def close(self) -> None:
        """Let go of the mapping. It stays until the last view of it is gone."""
        self._bytes = np.empty(0, np.uint8)
        try:
            self.map.close()
        except BufferError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_regular(path: str, flags: int) -> int:
    """An opener that neither waits for a pipe's writer nor reads a device or directory."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor


class _Cursor:
    """A position in the header. Every read is checked against the file's end and the header limit."""

    __slots__ = ("path", "buffer", "size", "at")

    U32, U64 = Struct("<I"), Struct("<Q")

    def __init__(self, path: Path, buffer: mmap.mmap, at: int = 0) -> None:
        self.path, self.buffer, self.size, self.at = path, buffer, len(buffer), at

    def error(self, found: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {found}")

    def skip(self, count: int, what: str) -> int:
        """Move past `count` bytes; returns where they start."""
        start, self.at = self.at, self.at + count
        if self.at > self.size:
            raise self.error(f"{what} needs {count} bytes at {start}, the file has {self.size}; it is cut short or"
                             " damaged, download it again")
        if self.at > MAX_HEADER_BYTES:
            raise self.error(f"{what} ends at byte {self.at}, a header may have {MAX_HEADER_BYTES}; it is damaged")
        return start

    def u32(self, what: str) -> int:
        (number,) = self.U32.unpack_from(self.buffer, self.skip(4, what))
        return int(number)

    def u64(self, what: str) -> int:
        (number,) = self.U64.unpack_from(self.buffer, self.skip(8, what))
        return int(number)

    def text(self, what: str) -> str:
        count = self.u64(what)
        start = self.skip(count, what)
        try:
            return str(self.buffer[start:start + count], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} at byte {start} is not UTF-8; the file is damaged") from None

    def name(self, what: str) -> str:
        start, name = self.at, self.text(what)
        if not 0 < len(name) <= MAX_NAME_BYTES or not name.isprintable():
            raise self.error(f"{what} at byte {start} has {len(name)} characters, need 1 to {MAX_NAME_BYTES}"
                             " printable ones; the file is damaged")
        return name


@dataclass(frozen=True, slots=True)
class _Strings:
    """An array of strings that nobody has asked for yet: checked, not decoded."""
    start: int
    count: int


class _Metadata(Mapping[str, Value]):
    """Key -> value. Arrays of strings are decoded on first use, which must come before the file is closed."""

    __slots__ = ("_path", "_buffer", "_values")

    def __init__(self, path: Path, buffer: mmap.mmap, values: dict[str, Value | _Strings]) -> None:
        self._path, self._buffer, self._values = path, buffer, values

    def __getitem__(self, key: str) -> Value:
        value = self._values[key]
        if isinstance(value, _Strings):
            cursor, what = _Cursor(self._path, self._buffer, value.start), f"metadata key {key}"
            value = self._values[key] = [cursor.text(what) for _ in range(value.count)]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if (magic := cursor.buffer[:4]) != MAGIC:
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, need {MAGIC!r}")
    cursor.skip(4, "the magic")
    version = cursor.u32("the version")
    if version != VERSION:
        raise cursor.error(f"GGUF version {version}, need {VERSION} in little-endian; convert the file anew")
    tensors, keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    for count, limit, what in ((tensors, MAX_TENSORS, "tensors"), (keys, MAX_KEYS, "keys")):
        if count > limit:
            raise cursor.error(f"the header announces {count} {what}, at most {limit} are read; it is damaged")
    return tensors, keys


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value | _Strings]:
    values: dict[str, Value | _Strings] = {}
    for _ in range(count):
        key = cursor.name("a metadata key")
        if key in values:
            raise cursor.error(f"metadata key {key} occurs twice; the file is damaged")
        what = f"metadata key {key}"
        values[key] = _read_value(cursor, what, cursor.u32(what))
    return values


def _read_value(cursor: _Cursor, what: str, type_id: int) -> Value | _Strings:
    if type_id == STRING:
        return cursor.text(what)
    if type_id == ARRAY:
        return _read_array(cursor, what, cursor.u32(what), cursor.u64(what))
    number: Value = _numbers(cursor, what, type_id, 1)[0].item()
    return number


def _read_array(cursor: _Cursor, what: str, type_id: int, count: int) -> np.ndarray | _Strings:
    if type_id == ARRAY:
        raise cursor.error(f"{what} is an array of arrays, need numbers or strings")
    if type_id != STRING:
        return _numbers(cursor, what, type_id, count)
    strings = _Strings(cursor.at, count)
    if count * 8 > cursor.size - cursor.at:
        raise cursor.error(f"{what} announces {count} strings, the file has {cursor.size} bytes; it is damaged")
    # The one long loop of opening a model (257 000 strings): kept free of calls.
    at, last = cursor.at, min(cursor.size, MAX_HEADER_BYTES) - 8
    length_of, buffer = cursor.U64.unpack_from, cursor.buffer
    for _ in range(count):
        if at > last:
            at += 8  # skip() below refuses the length that does not fit
            break
        at += 8 + length_of(buffer, at)[0]
    cursor.skip(at - cursor.at, what)
    return strings


def _numbers(cursor: _Cursor, what: str, type_id: int, count: int) -> np.ndarray:
    dtype = SCALARS.get(type_id)
    if dtype is None:
        raise cursor.error(f"{what} has value type {type_id}, known are 0 to 12; the file is damaged")
    start = cursor.skip(count * dtype.itemsize, what)
    values = np.frombuffer(cursor.buffer[start:cursor.at], dtype)
    if type_id == 7:
        values = values.view(np.uint8) != 0  # any byte but 0 is true; a raw bool of 2 is not a valid one in NumPy
    return values


def _alignment(cursor: _Cursor, values: Mapping[str, Value | _Strings]) -> int:
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        found = alignment if isinstance(alignment, int | float) else "no number"
        raise cursor.error(f"metadata key general.alignment is {found}, need a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_directory(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.name("a tensor name")
        if name in entries:
            raise cursor.error(f"tensor {name} occurs twice in the directory; the file is damaged")
        what = f"tensor {name}"
        rank = cursor.u32(what)
        if not 1 <= rank <= MAX_DIMS:
            raise cursor.error(f"{what} has {rank} dimensions, need 1 to {MAX_DIMS}; the file is damaged")
        dims = [cursor.u64(what) for _ in range(rank)]
        if 0 in dims:
            raise cursor.error(f"{what} has dimensions {dims}, none may be 0; the file is damaged")
        entries[name] = tuple(reversed(dims)), cursor.u32(what), cursor.u64(what)
    data = -(-cursor.at // alignment) * alignment
    return {name: _tensor(cursor, name, *entry, data, alignment) for name, entry in entries.items()}


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int, data: int,
            alignment: int) -> TensorInfo:
    """`offset` is relative to `data`, where the header's padding ends."""
    if offset % alignment:
        raise cursor.error(f"tensor {name} is at offset {offset}, need a multiple of {alignment}; the file is damaged")
    block = BY_ID.get(type_id)
    try:
        nbytes = prod(shape[:-1]) * row_bytes(block.name, shape[-1]) if block else 0
    except ValueError as error:
        raise cursor.error(f"tensor {name}: {error}; the file is damaged") from None
    start = data + offset
    if start + nbytes > cursor.size:
        raise cursor.error(f"tensor {name} needs {nbytes} bytes at {start}, the file has {cursor.size}; it is cut short"
                           " or damaged, download it again")
    return TensorInfo(name, shape, block.name if block else f"type {type_id}", start, nbytes)


def _refuse_overlaps(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    """Two tensors may be the very same bytes, read in the same way; any other overlap is damage."""
    ordered = sorted((t for t in tensors if t.nbytes), key=lambda t: (t.offset, t.nbytes))
    for before, after in zip(ordered, ordered[1:]):
        same = (before.offset, before.shape, before.kind) == (after.offset, after.shape, after.kind)
        if before.offset + before.nbytes > after.offset and not same:
            raise cursor.error(f"tensors {before.name} and {after.name} overlap at byte {after.offset};"
                               " the file is damaged")
