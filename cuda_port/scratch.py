"""Working memory by name: the same addresses in every step, so that a captured graph finds its data again. Each stream,
and so each thread's engines, has its own."""
from math import prod

import numpy as np

from ds4mlx.cuda_port.device import cupy as cp

Stream = tuple[int, int]    # of a device

_arrays: dict[Stream, dict[str, "cp.ndarray"]] = {}


def take(name: str, shape: tuple[int, ...], dtype: type | np.dtype = np.float32) -> "cp.ndarray":
    """An array of that shape in the buffer of that name, whose contents are whatever was there. A buffer grows when
    more is asked for than it has; captured graphs keep the buffer that they were captured with."""
    dtype = np.dtype(dtype)
    count = prod(shape) * dtype.itemsize
    arrays = _arrays.setdefault(_here(), {})
    array = arrays.get(name)
    if array is None or array.size < count:
        array = arrays[name] = cp.zeros(max(count, 256), cp.uint8)
    return array[:count].view(dtype).reshape(shape)


def held() -> list["cp.ndarray"]:
    """All buffers of the current stream, for a graph to keep alive."""
    return list(_arrays.get(_here(), {}).values())


def clear() -> None:
    """Forget those of the current stream."""
    _arrays.pop(_here(), None)


def _here() -> Stream:
    return cp.cuda.Device().id, cp.cuda.get_current_stream().ptr
