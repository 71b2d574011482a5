"""Arrays at the edge of the emulator: MLX arrays, NumPy arrays and Python numbers in, either kind of array out.

Inside, an array is a NumPy array and the name of its dtype; bfloat16, which NumPy lacks, travels as uint16.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx

    Input = mx.array | np.ndarray | np.generic | int | float | bool
    Dtype = mx.Dtype | np.dtype | type

# dtype -> what MLX writes for it in a kernel's signature
METAL_TYPES = {"bool": "bool", "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
               "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
               "float16": "float16_t", "float32": "float", "bfloat16": "bfloat16_t"}


def is_mlx(value: object) -> bool:
    """Whether it comes from MLX; asks without importing it."""
    return type(value).__module__.startswith("mlx.")


def dtype_name(dtype: Dtype) -> str:
    """Name of an MLX or NumPy dtype. Raises ValueError for one that a kernel cannot have."""
    name = str(dtype).removeprefix("mlx.core.") if is_mlx(dtype) else np.dtype(dtype).name
    if name not in METAL_TYPES:
        raise ValueError(f"dtype {name} has no place in a Metal kernel; use one of {', '.join(METAL_TYPES)}")
    return name


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def to_host(value: Input) -> tuple[np.ndarray, str]:
    """The array and its dtype's name; Python numbers become what MLX makes of them."""
    if is_mlx(value):
        import mlx.core as mx
        name = dtype_name(value.dtype)
        return np.array(value.view(mx.uint16) if name == "bfloat16" else value, copy=False), name
    if isinstance(value, (bool, int, float)):
        name = "bool" if isinstance(value, bool) else "int32" if isinstance(value, int) else "float32"
        return np.array(value, name), name
    array = np.asarray(value)
    return array, dtype_name(array.dtype)


def from_host(raw: np.ndarray, name: str, shape: tuple[int, ...], as_mlx: bool) -> mx.array | np.ndarray:
    """An output from its bytes (uint8). As a NumPy array bfloat16 becomes float32."""
    array = raw.view(np.uint16 if name == "bfloat16" else name).reshape(shape)
    if as_mlx:
        import mlx.core as mx
        return mx.array(array).view(mx.bfloat16) if name == "bfloat16" else mx.array(array)
    return array if name != "bfloat16" else (array.astype(np.uint32) << 16).view(np.float32)


def filled(nbytes: int, name: str, value: float | None) -> np.ndarray:
    """The bytes of an output before the launch. Where no value is given Metal leaves them undefined: NaN for floats."""
    if value is None:
        return np.full(nbytes, 0xFF, np.uint8)
    if name == "bfloat16":
        return np.full(nbytes // 2, np.float32(value).view(np.uint32) >> 16, np.uint16).view(np.uint8)
    return np.full(nbytes // itemsize(name), value, name).view(np.uint8)
