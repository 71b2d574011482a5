"""Working memory by name: the same addresses in every step, so that a captured graph finds its data again."""
from math import prod

import numpy as np

from ds4mlx.cuda_port.device import cupy as cp

_arrays: dict[tuple[str, int], "cp.ndarray"] = {}


def take(name: str, shape: tuple[int, ...], dtype: type | np.dtype = np.float32) -> "cp.ndarray":
    """An array of that shape in the buffer of that name, whose contents are whatever was there. A buffer grows when
    more is asked for than it has; captured graphs keep the buffer that they were captured with."""
    dtype = np.dtype(dtype)
    count = prod(shape) * dtype.itemsize
    key = name, cp.cuda.Device().id
    held = _arrays.get(key)
    if held is None or held.size < count:
        held = _arrays[key] = cp.zeros(max(count, 256), cp.uint8)
    return held[:count].view(dtype).reshape(shape)


def held() -> list["cp.ndarray"]:
    """All buffers, for a graph to keep alive."""
    return list(_arrays.values())


def clear() -> None:
    _arrays.clear()
