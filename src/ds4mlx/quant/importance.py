"""How much each input column of a matrix counts: the mean square of what a model multiplies it with.

Two files of llama.cpp hold it, read and written here:
  .dat, little-endian: i32 entries; each an i32 length and a name, i32 calls, i32 count and f32 values, which are means
      times calls; then i32 chunks, an i32 length and the data set's name. Experts follow one another in an entry.
  GGUF: `NAME.in_sum2` [experts, columns] and `NAME.counts` [experts, 1], sums and numbers of rows.
"""
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from tempfile import mkstemp

import numpy as np

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF, MAGIC, MAX_TENSORS
from ds4mlx.gguf.writer import write_gguf

I32 = Struct("<i")
SUMS, COUNTS = ".in_sum2", ".counts"
MAX_NAME_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Entry:
    """Of one matrix or one stack."""
    sums: np.ndarray    # f32 [matrices, columns], of squares; one row where it is not said how many matrices there are
    counts: np.ndarray  # f32 [matrices], rows that were added

    def means(self) -> np.ndarray:
        """f32 [matrices, columns]; ones for a matrix that nothing was multiplied with."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.where(counts > 0, counts, 1), 1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Importance:
    """A file of it, by tensor name."""
    path: Path
    entries: Mapping[str, Entry]
    dataset: str
    chunks: int

    def of(self, names: Sequence[str], expert: int, experts: int, columns: int) -> np.ndarray | None:
        """f32 [columns] of one matrix; None where the file says nothing about it. Raises ModelFileError where it is
        of another shape.

        `names` are those of the tensor, the first that is there counts. An entry may be of the expert alone,
        `NAME.expert.E` or `NAME.expert_E`, or of all experts.
        """
        for name in names:
            for spelled in (f"{name}.expert.{expert}", f"{name}.expert_{expert}"):
                if spelled in self.entries:
                    return self._row(spelled, 0, 1, columns)
            if name in self.entries:
                return self._row(name, expert, experts, columns)
        return None

    def _row(self, name: str, expert: int, experts: int, columns: int) -> np.ndarray:
        entry = self.entries[name]
        if entry.sums.size not in (columns, experts * columns):
            raise ModelFileError(f"{self.path}: {name} has {entry.sums.size} values, need {experts} x {columns}; give "
                                 "the imatrix of this model")
        at = expert if entry.sums.size > columns else 0
        sums, count = entry.sums.reshape(-1, columns)[at], entry.counts[at if len(entry.counts) > 1 else 0]
        return sums / count if count > 0 else np.ones(columns, np.float32)


def read(path: Path) -> Importance:
    """Either format. Raises ModelFileError."""
    try:
        with open(path, "rb") as file:
            return _read_gguf(path) if file.read(4) == MAGIC else _read_dat(path, path.read_bytes())
    except OSError as fault:
        raise ModelFileError(f"{path}: {fault.strerror}; give the path of an imatrix") from None


def _read_gguf(path: Path) -> Importance:
    with GGUF.open(path) as file:
        entries = {}
        for name in file.tensors:
            if name.endswith(SUMS) and (counts := name.removesuffix(SUMS) + COUNTS) in file.tensors:
                entries[name.removesuffix(SUMS)] = _entry(path, file, name, counts)
        datasets, chunks = file.metadata.get("imatrix.datasets"), file.metadata.get("imatrix.chunk_count", 0)
        dataset = datasets[0] if isinstance(datasets, list) and datasets else ""
    return _checked(Importance(path, entries, dataset, chunks if isinstance(chunks, int) else 0))


def _entry(path: Path, file: GGUF, sums: str, counts: str) -> Entry:
    info, number = file.tensors[sums], file.tensors[counts]
    matrices = info.shape[0] if len(info.shape) > 1 else 1
    if info.kind != "F32" or number.kind != "F32" or np.prod(number.shape) != matrices:
        raise ModelFileError(f"{path}: {sums} is {info.kind} {list(info.shape)} with {list(number.shape)} counts, need "
                             "F32 and a count for each row; collect it again")
    values, numbers = file.raw(sums).view("<f4"), file.raw(counts).view("<f4")
    return Entry(values.reshape(matrices, -1).copy(), numbers.reshape(-1).copy())


def _read_dat(path: Path, data: bytes) -> Importance:
    cursor = _Cursor(path, data)
    entries = {}
    for _ in range(cursor.count("entries", MAX_TENSORS)):
        name = cursor.text("a name")
        calls, size = cursor.integer("calls"), cursor.count("values", len(data) // 4)
        values = np.frombuffer(cursor.take(4 * size, f"values of {name}"), "<f4")
        entries[name] = Entry(values[None] / np.float32(max(calls, 1)), np.ones(1, np.float32))
    chunks, dataset = 0, ""
    if cursor.at < len(data):  # older files end here
        chunks, dataset = cursor.integer("chunks"), cursor.text("the data set")
    return _checked(Importance(path, entries, dataset, chunks))


class _Cursor:
    """A position in a .dat file. Every read is checked against its end."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int, what: str) -> bytes:
        taken = self.data[self.at:self.at + size]
        if len(taken) < size:
            raise ModelFileError(f"{self.path}: {what} needs {size} bytes at {self.at}, the file has "
                                 f"{len(self.data)}; it is no imatrix or cut short")
        self.at += size
        return taken

    def integer(self, what: str) -> int:
        return I32.unpack(self.take(4, what))[0]

    def count(self, what: str, most: int) -> int:
        count = self.integer(what)
        if not 0 <= count <= most:
            raise ModelFileError(f"{self.path}: announces {count} {what}, need 0 to {most}; it is no imatrix or "
                                 "damaged")
        return count

    def text(self, what: str) -> str:
        return self.take(self.count(f"bytes of {what}", MAX_NAME_BYTES), what).decode("utf-8", "replace")


def _checked(found: Importance) -> Importance:
    if not found.entries:
        raise ModelFileError(f"{found.path}: holds no importance of any matrix; give an imatrix")
    for name, entry in found.entries.items():
        means = entry.means()
        if not means.size or not np.isfinite(means).all() or (means < 0).any():
            raise ModelFileError(f"{found.path}: {name} has values that are not finite, or below 0; collect it again")
    return found


def write(found: Importance) -> None:
    """To its path: as .dat if it is called so, as GGUF otherwise. Whole or not at all. Raises ModelFileError."""
    try:
        if found.path.suffix == ".dat":
            _write_dat(found)
        else:
            _write_gguf(found)
    except OSError as fault:
        raise ModelFileError(f"{found.path}: {fault.strerror}; give a path that can be written") from None


def _write_gguf(found: Importance) -> None:
    tensors = []
    for name, entry in found.entries.items():
        tensors += [(name + SUMS, "F32", entry.sums.shape, entry.sums.astype("<f4")),
                    (name + COUNTS, "F32", (len(entry.counts), 1), entry.counts.astype("<f4"))]
    write_gguf(found.path, {"general.type": "imatrix", "imatrix.datasets": [found.dataset],
                            "imatrix.chunk_count": found.chunks, "imatrix.chunk_size": 1}, tensors)


def _write_dat(found: Importance) -> None:
    descriptor, partial = mkstemp(prefix=f".{found.path.name}.", suffix=".partial", dir=found.path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(_dat(found))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # mkstemp made it private
        os.replace(partial, found.path)
    except BaseException:
        os.unlink(partial)
        raise


def _dat(found: Importance) -> Iterator[bytes]:
    yield I32.pack(len(found.entries))
    for name, entry in found.entries.items():
        raw, means = name.encode(), entry.means().astype("<f4")
        yield from (I32.pack(len(raw)), raw, I32.pack(1), I32.pack(means.size), means.tobytes())
    dataset = found.dataset.encode()
    yield from (I32.pack(found.chunks), I32.pack(len(dataset)), dataset)
