"""A checkpoint's safetensors files as names: headers read and checked, tensors mapped and never copied.

A file is a u64 length, a JSON header of that length, then the data; names may be spread over several files, which an
index lists. Everything is checked here that needs no knowledge of a model.
"""
import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import unpack

import numpy as np

from ds4mlx.errors import ModelFileError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20    # the format's own limit
END_BYTES = 4096                # of a tensor, that its digest covers on either side
# safetensors name -> bytes of an element. FP4 codes come in pairs, as I8 or U8.
DTYPES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4,
                          "I64": 8}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor where it lies."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int     # from the start of the file, bytes
    nbytes: int


class Shards:
    """All tensors of a checkpoint's directory."""

    def __init__(self, directory: Path) -> None:
        """Map every file and read its header. Raises ModelFileError for anything but intact files."""
        self.directory = directory
        self._files: dict[Path, mmap.mmap] = {}
        tensors: dict[str, Stored] = {}
        index = _index(directory)
        for path in _files(directory, index):
            self._files[path] = _mapped(path)
            for stored in _header(path, self._files[path]):
                if index is not None and index.get(stored.name) != path.name:
                    continue  # a leftover that the index does not name
                if stored.name in tensors:
                    raise ModelFileError(f"{path}: tensor {stored.name} is also in {tensors[stored.name].file.name}; "
                                         "leave only the files of one checkpoint in the directory")
                tensors[stored.name] = stored
        if missing := [name for name in index or () if name not in tensors]:
            raise ModelFileError(f"{directory / INDEX}: {len(missing)} tensors are in none of the files, {missing[0]} "
                                 "first; download the checkpoint again")
        self.tensors: Mapping[str, Stored] = tensors

    def raw(self, stored: Stored) -> np.ndarray:
        """The tensor's bytes: read-only u8 [nbytes], in the mapping."""
        return np.frombuffer(self._files[stored.file], np.uint8, stored.nbytes, stored.offset)

    def digest(self) -> str:
        """Hex SHA-256 over the entry and both ends of every tensor, in the order of their names. How they are spread
        over files does not count."""
        for file in self._files.values():  # few bytes here and there: do not bring in their surroundings
            _advise(file, "MADV_RANDOM")
        total = hashlib.sha256()
        for name, stored in sorted(self.tensors.items()):
            raw = self.raw(stored)
            ends = hashlib.sha256(raw[:END_BYTES])
            ends.update(raw[-END_BYTES:])
            total.update(json.dumps([name, stored.dtype, list(stored.shape), ends.hexdigest()]).encode())
        for file in self._files.values():
            _advise(file, "MADV_NORMAL")
        return total.hexdigest()


def _index(directory: Path) -> dict[str, str] | None:
    """Tensor -> file name, or None where there is no index."""
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_bytes())["weight_map"]
        assert isinstance(index, dict) and all(isinstance(name, str) and name == os.path.basename(name)
                                               for name in index.values())
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as fault:
        raise ModelFileError(f"{path}: no index of safetensors files ({fault!r:.80}); download it again") from None
    return index


def _files(directory: Path, index: Mapping[str, str] | None) -> list[Path]:
    names = sorted(set(index.values()) if index is not None else (p.name for p in directory.glob("*.safetensors")))
    if not names:
        raise ModelFileError(f"{directory}: holds no *.safetensors; give the directory of a checkpoint")
    return [directory / name for name in names]


def _advise(file: mmap.mmap, advice: str) -> None:
    if hasattr(mmap, advice):  # not on every system
        file.madvise(getattr(mmap, advice))


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < 8:
                raise ModelFileError(f"{path}: cut short before its header; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as fault:
        raise ModelFileError(f"{path}: cannot be read ({fault}); download the checkpoint again") from None


def _header(path: Path, data: mmap.mmap) -> list[Stored]:
    length = unpack("<Q", data[:8])[0]
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ModelFileError(f"{path}: announces a header of {length} bytes, the file has {len(data)}; it is cut short "
                             "or no safetensors file, download it again")
    try:
        header = json.loads(data[8:8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as fault:
        raise ModelFileError(f"{path}: its header is no JSON object ({fault!r:.80}); download it again") from None
    return [_stored(path, name, entry, 8 + length, len(data)) for name, entry in entries.items()]


def _stored(path: Path, name: str, entry: object, start: int, size: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        assert isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError, AssertionError):
        raise ModelFileError(f"{path}: the entry of {name[:80]!r} is damaged; download the file again") from None
    if dtype in DTYPES and end - begin != prod(shape) * DTYPES[dtype] or not 0 <= begin <= end <= size - start:
        raise ModelFileError(f"{path}: tensor {name} {dtype} {list(shape)} is at {begin} to {end} of {size - start} "
                             "bytes; the file is cut short or damaged, download it again")
    return Stored(name, dtype, shape, path, start + begin, end - begin)
