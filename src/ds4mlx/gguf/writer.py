"""Write a GGUF file, and encode weights into the block types that need no search."""
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import pack
from typing import BinaryIO, cast

import numpy as np

from ds4mlx.gguf.blocks import BLOCK_TYPES, row_bytes
from ds4mlx.gguf.dequant import E2M1
from ds4mlx.gguf.reader import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, VERSION

Number = int | float | bool | Sequence[int] | Sequence[float]
Value = Number | str | Sequence[str] | np.ndarray | np.generic
Metadata = Mapping[str, Value]
Data = bytes | bytearray | memoryview | np.ndarray
Tensor = tuple[str, str, tuple[int, ...], Data | Callable[[], Data] | None]

_IDS = {dtype: type_id for type_id, dtype in SCALARS.items()}


def write_gguf(path: str | os.PathLike[str], metadata: Metadata, tensors: Iterable[Tensor]) -> None:
    """Write `path` in one step: it holds the whole file or what it held before.

    Metadata: a Python int becomes u32 (i32 if negative, 64 bits if it must), a float f32, a NumPy scalar or array its
    own type. A tensor is (name, kind, row-major shape, data): data are the blocks, or a function that returns them,
    called when their turn comes, or None for zeros left as a hole in the file. Tensors given the same data object,
    kind and shape share their bytes. Raises ValueError for what GGUF cannot hold or data of the wrong size.
    """
    path = Path(path)
    tensors = list(tensors)
    alignment = _alignment(metadata)
    places, end = _place(tensors, alignment)
    header = _header(metadata, tensors, places, alignment)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(header)
            for tensor, place in zip(tensors, places):
                if not place.shared:
                    file.seek(len(header) + place.offset)
                    _write_data(file, tensor)
            file.truncate(len(header) + end)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # mkstemp made it private
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


@dataclass(frozen=True, slots=True)
class Layout:
    """A file that is yet to be filled in."""
    header: bytes
    offsets: tuple[int, ...]    # of the tensors, from the start of the file
    nbytes: int                 # of the whole file


def layout(metadata: Metadata, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """Where everything goes in the file that `write_gguf` would write for tensors of (name, kind, row-major shape)."""
    entries: list[Tensor] = [(*tensor, None) for tensor in tensors]
    alignment = _alignment(metadata)
    places, end = _place(entries, alignment)
    header = _header(metadata, entries, places, alignment)
    return Layout(header, tuple(len(header) + place.offset for place in places), len(header) + end)


def _header(metadata: Metadata, tensors: Sequence[Tensor], places: "Sequence[_Place]", alignment: int) -> bytes:
    header = b"".join([MAGIC, pack("<IQQ", VERSION, len(tensors), len(metadata)),
                       *(_text(key) + _value(key, value) for key, value in metadata.items()),
                       *(_entry(tensor, place.offset) for tensor, place in zip(tensors, places))])
    return header + bytes(-len(header) % alignment)


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int     # from the start of the data
    shared: bool    # written already by an earlier tensor


def _place(tensors: Sequence[Tensor], alignment: int) -> tuple[list[_Place], int]:
    """Where each tensor goes, and where the last one's padding ends."""
    known: dict[tuple[int, str, tuple[int, ...]], int] = {}
    places, end = [], 0
    for _, kind, shape, data in tensors:
        key = (id(data), kind, tuple(shape))
        shared = data is not None and key in known
        places.append(_Place(known[key] if shared else end, shared))
        if not shared:
            known[key] = end
            end += -(-_nbytes(kind, shape) // alignment) * alignment
    return places, end


def _alignment(metadata: Metadata) -> int:
    """Of tensors' data in the file, in bytes."""
    return int(cast(int, metadata.get("general.alignment", DEFAULT_ALIGNMENT)))


def _nbytes(kind: str, shape: Sequence[int]) -> int:
    return prod(shape[:-1]) * row_bytes(kind, shape[-1])


def _write_data(file: BinaryIO, tensor: Tensor) -> None:
    name, kind, shape, data = tensor
    if data is None:
        return
    blocks = data() if callable(data) else data
    blocks = np.ascontiguousarray(blocks).data if isinstance(blocks, np.ndarray) else memoryview(blocks)
    if blocks.nbytes != _nbytes(kind, shape):
        raise ValueError(f"tensor {name} {kind} {tuple(shape)} needs {_nbytes(kind, shape)} bytes, got {blocks.nbytes}")
    file.write(blocks)


def _entry(tensor: Tensor, offset: int) -> bytes:
    name, kind, shape, _ = tensor
    dims = pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return _text(name) + dims + pack("<IQ", BLOCK_TYPES[kind].type_id, offset)


def _text(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw


def _value(key: str, value: Value) -> bytes:
    if isinstance(value, str):
        return pack("<I", STRING) + _text(value)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    numbers = value if isinstance(value, np.ndarray | np.generic) else _numbers(cast(Number, value))
    if numbers.dtype not in _IDS or numbers.ndim > 1:
        raise ValueError(f"metadata key {key}: GGUF cannot hold {numbers.dtype} {numbers.shape}")
    count = pack("<IIQ", ARRAY, _IDS[numbers.dtype], numbers.size) if numbers.ndim else pack("<I", _IDS[numbers.dtype])
    return count + numbers.tobytes()


def _numbers(value: Number) -> np.ndarray:
    """The narrowest type that readers of GGUF expect."""
    numbers = np.asarray(value)
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float32)
    if numbers.dtype.kind not in "iu" or not numbers.size:
        return numbers
    types = (np.uint32, np.int32, np.uint64, np.int64)
    fits = (t for t in types if np.iinfo(t).min <= numbers.min() and numbers.max() <= np.iinfo(t).max)
    return numbers.astype(next(fits))


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Round to nearest: values [..., width] -> blocks u8 [..., row bytes]. I32 takes whole numbers.

    Raises ValueError for a kind that needs a search (Q2_K, Q4_K, IQ2_XXS), a width of partial blocks, or values that
    are not finite or too large for the kind.
    """
    encode = _ENCODERS.get(kind)
    if encode is None:
        raise ValueError(f"no encoder for {kind}, have {', '.join(_ENCODERS)}")
    width = values.shape[-1]
    nbytes = row_bytes(kind, width)
    if kind != "I32":
        values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{kind} needs finite weights")
    blocks = encode(np.ascontiguousarray(values).reshape(-1, BLOCK_TYPES[kind].weights))
    return blocks.reshape(*values.shape[:-1], nbytes)


def _f16(x: np.ndarray) -> np.ndarray:
    _check_half(x, "F16")
    return x.astype("<f2").view(np.uint8)


def _check_half(x: np.ndarray, kind: str) -> None:
    largest = float(np.abs(x).max(initial=0))
    if largest >= 65520:
        raise ValueError(f"{kind} stores half-precision numbers, {largest:g} is too large")


def _bf16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, by a carry into the upper half of the word."""
    bits = x.view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2").view(np.uint8)


def _i32(x: np.ndarray) -> np.ndarray:
    whole = x.astype("<i4")
    if not np.array_equal(whole, x):
        raise ValueError("I32 needs whole numbers of 32 bits")
    return whole.view(np.uint8)


def _q8_0(x: np.ndarray) -> np.ndarray:
    """d = max|x| / 127; codes against d before it is rounded to half precision, ties away from zero.

    So do the tools that published files come from: the same weights give the same bytes.
    """
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    _check_half(d, "Q8_0")
    codes = x * np.divide(1, d, out=np.zeros_like(d), where=d > 1e-38)
    codes = np.trunc(codes + np.copysign(0.5, codes, dtype=np.float64))
    return np.concatenate([d.astype("<f2").view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)


def _mxfp4(x: np.ndarray) -> np.ndarray:
    """The smallest power of two under which no weight passes 6; then the nearest code, ties to the even one."""
    mantissa, exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True) / np.float32(6))
    e = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)     # ceil(log2), from the bits
    scaled = np.abs(np.ldexp(x, 127 - e)).astype(np.float32)
    middles = (E2M1[:7] + E2M1[1:8]) / 2
    codes = np.searchsorted(middles, scaled)                    # a tie falls to the lower code ...
    codes += (codes % 2 == 1) & (scaled == middles[np.minimum(codes, 6)])  # ... and moves up from an odd one
    codes = codes.astype(np.uint8) | np.signbit(x).astype(np.uint8) << 3
    return np.concatenate([e.astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)


_ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda x: x.astype("<f4").view(np.uint8), "F16": _f16, "BF16": _bf16, "I32": _i32,
    "Q8_0": _q8_0, "MXFP4": _mxfp4,
}
