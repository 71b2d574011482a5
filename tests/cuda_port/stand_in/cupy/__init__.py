"""NumPy where the CUDA engine expects CuPy, for what it does on the host: arrays in the card's place, streams that do
nothing, graphs that nothing happens in. Kernels are not run; `launches.py` sees what they would be launched with."""
import ctypes
from types import SimpleNamespace

import numpy as np
from numpy import float16, float32, inf, int32, uint8, uint16, uint32  # noqa: F401, under CuPy's name

COUNTS = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}


class Memory:
    def __init__(self, array):
        self.array, self.ptr = array, array.__array_interface__["data"][0]

    def copy_from_host_async(self, address, count, stream):
        assert count <= self.array.nbytes
        ctypes.memmove(self.ptr, address, count)

    def copy_to_host_async(self, address, count, stream):
        assert count <= self.array.nbytes
        ctypes.memmove(address, self.ptr, count)

    def copy_from_device_async(self, other, count, stream):
        assert count <= min(self.array.nbytes, other.array.nbytes)
        ctypes.memmove(self.ptr, other.ptr, count)


class ndarray(np.ndarray):
    @property
    def data(self):
        return Memory(self)


def _as_card(make):
    return lambda *args, **rest: np.asarray(make(*args, **rest)).view(ndarray)


zeros, concatenate, stack, where = map(_as_card, (np.zeros, np.concatenate, np.stack, np.where))
empty, zeros_like, asarray = zeros, _as_card(np.zeros_like), _as_card(np.array)
asnumpy = np.array


def split(array, at):
    return [part.view(ndarray) for part in np.split(array, at)]


class Event:
    def synchronize(self): ...


class Graph:
    def launch(self): ...


class Stream:
    ptr = 0

    def __init__(self, non_blocking=False): ...

    def use(self):
        return self

    def synchronize(self): ...

    def record(self):
        return Event()

    def begin_capture(self): ...

    def end_capture(self):
        return Graph()


class Device:
    id, mem_info, compute_capability = 0, (140 << 30, 141 << 30), "90"

    def __init__(self, id=0): ...

    def __enter__(self): ...

    def __exit__(self, *fault): ...

    attributes = type("Attributes", (dict,), {"__missing__": lambda self, key: 232448})(COUNTS)


class RawModule:
    def __init__(self, code, options, backend):
        self.code, self.options = code, options

    def compile(self): ...

    def get_function(self, name):
        return SimpleNamespace(code=self.code, options=self.options, name=name)


def get_default_memory_pool():
    return SimpleNamespace(free_all_blocks=lambda: None, used_bytes=lambda: 0, total_bytes=lambda: 0)


_stream = Stream()
cuda = SimpleNamespace(
    Stream=Stream, Event=Event, Device=Device, get_current_stream=lambda: _stream, alloc_pinned_memory=bytearray,
    runtime=SimpleNamespace(is_hip=False, CUDA_R_16F=2, CUDA_R_32F=0, CUDARuntimeError=RuntimeError,
                            getDeviceCount=lambda: 1, driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13020,
                            getDeviceProperties=lambda device: {"name": b"stand-in"}),
    nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
    memory=SimpleNamespace(OutOfMemoryError=MemoryError), graph=SimpleNamespace(Graph=Graph),
    device=SimpleNamespace(get_cublas_handle=lambda: 0))
