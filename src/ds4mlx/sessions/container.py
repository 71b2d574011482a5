"""A safetensors container of named arrays inside a cache file: u64 length, JSON, data.

Any safetensors reader can open the slice. Ours reads it with ordinary reads into arrays that the caller has made by
its own knowledge of their shapes, so that a file can never make it allocate. The JSON is written in one way only:
`__metadata__` first, arrays in storage order, compact, ASCII, padded with spaces until data starts at a multiple of 64.
"""
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from os import SEEK_CUR
from typing import BinaryIO, Self

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.integrity import Bytes, Corrupt, Foreign, Mismatch, array_bytes, fill, read_at

FORMAT = "ds4mlx-kv/1"
LENGTH_BYTES = 8
MOST_JSON_BYTES = 1 << 20  # a million tokens of Flash take some 60 kB
MOST_RANK, MOST_ELEMENTS = 4, 1 << 40

# bfloat16 travels as its bits: numpy has no such type, and no state holds another 16-bit integer.
DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype("u1"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"), "I32": np.dtype("<i4")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Arrays = Mapping[str, tuple[tuple[int, ...], np.dtype]]  # name -> (shape, dtype), in storage order


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array: `dtype` by its safetensors name."""
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Self:
        """Raises KeyError for a dtype that a state never holds; uint16 stands for bfloat16."""
        return cls(name, NAMES[np.dtype(dtype)], tuple(shape))


@dataclass(frozen=True, slots=True)
class Container:
    """What the JSON says, checked: arrays lie one after the other and fill the data."""
    metadata: Mapping[str, str]
    arrays: tuple[ArraySpec, ...]
    crcs: tuple[int, ...]   # CRC-32 of each array's bytes
    json_bytes: int         # with padding

    @property
    def data_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.arrays)


def write_container(metadata: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> tuple[Bytes, ...]:
    """The length, the JSON and each array's bytes. `metadata` keeps its order; its "crc32" is filled in here."""
    data = {name: array_bytes(np.ascontiguousarray(array)) for name, array in arrays.items()}
    crcs = {name: zlib.crc32(view) for name, view in data.items()}
    entries: dict[str, object] = {"__metadata__": dict(metadata) | {"crc32": compact(crcs)}}
    at = 0
    for name, array in arrays.items():
        spec = ArraySpec.of(name, array.shape, array.dtype)
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    raw = compact(entries).encode("ascii")
    raw += b" " * (-(LENGTH_BYTES + len(raw)) % 64)
    if len(raw) > MOST_JSON_BYTES:
        raise CheckpointError(f"the list of {len(arrays)} arrays takes {len(raw)} bytes, at most {MOST_JSON_BYTES} "
                              "can be read back; the state is not saved")
    return len(raw).to_bytes(LENGTH_BYTES, "little"), raw, *data.values()


def read_container(src: BinaryIO, at: int, payload_bytes: int, json_crc: int) -> Container:
    """What the payload at `at` holds, its data unread. The caller has compared `payload_bytes` with the file's size.

    Raises Corrupt when the JSON's CRC is another, it is not well formed or does not add up; Foreign for a format or
    dtype not known here.
    """
    length = int.from_bytes(read_at(src, at, LENGTH_BYTES), "little") if payload_bytes >= LENGTH_BYTES else 0
    if not 2 <= length <= min(payload_bytes - LENGTH_BYTES, MOST_JSON_BYTES):
        raise Corrupt(f"a payload of {payload_bytes} bytes begins with {length} bytes of JSON; it will be set aside")
    raw = read_at(src, at + LENGTH_BYTES, length)
    if zlib.crc32(raw) != json_crc:
        raise Corrupt("the JSON's CRC is not the one in the footer; the file will be set aside")
    return parse_container(raw, payload_bytes - LENGTH_BYTES - length)


def parse_container(raw: bytes, data_bytes: int) -> Container:
    """The JSON, padding included, of a container with `data_bytes` of data. Raises as read_container does."""
    root = read_json(raw)
    if not isinstance(root, dict) or not isinstance(metadata := root.pop("__metadata__", None), dict) or not all(
            isinstance(value, str) for value in metadata.values()):
        raise Corrupt("the JSON is no object with an object of strings as __metadata__; the file will be set aside")
    if metadata.get("format") != FORMAT:
        raise Foreign(f"the payload is {metadata.get('format')!a}, this program reads {FORMAT}; it is left alone")
    arrays, at = [], 0
    for name, entry in root.items():
        spec = _spec(name, entry, at)
        arrays.append(spec)
        at += spec.nbytes
    if at != data_bytes:
        raise Corrupt(f"arrays take {at} bytes, the payload has {data_bytes} for them; the file will be set aside")
    crcs = read_json(metadata.get("crc32", ""))
    if not isinstance(crcs, dict) or crcs.keys() != root.keys() or not all(map(_is_u32, crcs.values())):
        raise Corrupt("the payload has no CRC for each of its arrays; the file will be set aside")
    return Container(metadata, tuple(arrays), tuple(crcs[spec.name] for spec in arrays), len(raw))


def _spec(name: str, entry: object, at: int) -> ArraySpec:
    """One entry of the JSON; its data has to begin at `at`."""
    if not _NAME.fullmatch(name) or not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"array {name[:64]!a} is not described by dtype, shape and offsets; the file will be set aside")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MOST_RANK or not all(map(_is_u32, shape)):
        raise Corrupt(f"{name} has no shape of at most {MOST_RANK} sizes; the file will be set aside")
    if math.prod(size or 1 for size in shape) > MOST_ELEMENTS:  # an empty array has a shape that numpy must take too
        raise Corrupt(f"{name} is of shape {shape}, more than any state holds; the file will be set aside")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Foreign(f"{name} is of dtype {dtype!a:.20}, this program reads {', '.join(DTYPES)}; it is left alone")
    spec = ArraySpec(name, dtype, tuple(shape))
    if offsets != [at, at + spec.nbytes]:
        raise Corrupt(f"{name} is not at bytes {at} to {at + spec.nbytes}; the file will be set aside")
    return spec


def check_arrays(container: Container, expected: Arrays) -> None:
    """Raises Mismatch unless the container holds exactly `expected`, in its order."""
    wanted = tuple(ArraySpec.of(name, shape, dtype) for name, (shape, dtype) in expected.items())
    for found, needed in zip_longest(container.arrays, wanted):
        if found != needed:
            raise Mismatch(f"found {_named(found)}, need {_named(needed)}; the file is another model's or setting's")


def read_arrays(src: BinaryIO, at: int, container: Container, into: Mapping[str, np.ndarray], *,
                verify: bool = True) -> None:
    """Fills the arrays of `into`, which may be some of the container's, from data that starts at `at`.

    Each must be C-contiguous, of the shape and dtype of the one in the file: Mismatch otherwise. Raises Incomplete
    when the file ends early and, with `verify`, Corrupt when an array's CRC is not the one in the JSON.
    """
    if unknown := into.keys() - {spec.name for spec in container.arrays}:
        raise Mismatch(f"the file holds no {min(unknown)}; it is another model's or setting's")
    src.seek(at)
    for spec, crc in zip(container.arrays, container.crcs):
        if spec.name not in into:
            src.seek(spec.nbytes, SEEK_CUR)
            continue
        target = into[spec.name]
        if (needed := ArraySpec.of(spec.name, target.shape, target.dtype)) != spec:
            raise Mismatch(f"found {_named(spec)}, need {_named(needed)}; the file is another model's or setting's")
        view = array_bytes(target)
        fill(src, view)
        if verify and zlib.crc32(view) != crc:
            raise Corrupt(f"the CRC of {spec.name} is not the one in the JSON; the file will be set aside")


def compact(value: object) -> str:
    """JSON in the one way this project writes it: compact, ASCII, keys as they stand."""
    return json.dumps(value, separators=(",", ":"))


def read_json(raw: bytes | str) -> object:
    """JSON of objects, lists, strings, integers and the literals. Raises Corrupt, however deep or odd the text is."""
    try:
        text = raw if isinstance(raw, str) else raw.decode("ascii")
        return json.loads(text, object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # 3.11 refuses integers of thousands of digits by itself
        raise Corrupt(f"the JSON cannot be read: {ascii(str(error))[:80]}; the file will be set aside") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(out := dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return out


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal[:20]} is no integer")


def _is_u32(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32  # True and False are ints of another type


def _named(spec: ArraySpec | None) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}" if spec else "no further array"


_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")
