"""A safetensors container of named arrays inside a cache file: u64 length, JSON, data.

Any safetensors reader can open the slice. Ours reads it with ordinary reads into arrays that the caller has made by
its own knowledge of their shapes, so that a file can never make it allocate. The JSON is written in one way only:
`__metadata__` first, arrays in storage order, compact, ASCII, padded with spaces until data starts at a multiple of 64.
"""
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Self

import numpy as np

from ds4mlx.sessions.integrity import Bytes, Corrupt, Foreign, Mismatch, array_bytes, fill

FORMAT = "ds4mlx-kv/1"
MOST_JSON_BYTES = 1 << 20  # a million tokens of Flash take some 60 kB
MOST_RANK, MOST_ELEMENTS = 4, 1 << 40

# bfloat16 travels as its bits: numpy has no such type, and no state holds another 16-bit integer.
DTYPES = {"U8": np.dtype("u1"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4"),
          "U32": np.dtype("<u4"), "I32": np.dtype("<i4")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    raise NotImplementedError


def array_crcs(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """CRC-32 of each array's bytes."""
    return {name: zlib.crc32(array_bytes(array)) for name, array in arrays.items()}


def parse_container(raw: bytes, data_bytes: int) -> Container:
    """The JSON, padding included, of a container with `data_bytes` of data.

    Raises Corrupt when it is not well formed or does not add up, Foreign for a format or dtype not known here.
    """
    raise NotImplementedError


def read_arrays(src: BinaryIO, at: int, container: Container, into: Mapping[str, np.ndarray], *,
                verify: bool = True) -> None:
    """Fills the arrays of `into`, which may be some of the container's, from data that starts at `at`.

    Each must be C-contiguous, of the shape and dtype of the one in the file: Mismatch otherwise. Raises Incomplete
    when the file ends early and, with `verify`, Corrupt when an array's CRC is not the one in the JSON.
    """
    raise NotImplementedError


def check_arrays(container: Container, expected: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Raises Mismatch unless the container holds exactly `expected`: name -> (shape, dtype), in storage order."""
    raise NotImplementedError
