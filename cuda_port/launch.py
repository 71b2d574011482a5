"""Launches through the driver: arguments that are structures, and kernels that begin while the one before them ends.

A kernel launched here may run before its predecessor in the stream has finished. It must wait (AWAIT_TURN in
lanes.cuh) before it reads or writes anything but weights; then all that the predecessor wrote is there.
"""
import ctypes
from collections.abc import Sequence
from functools import cache

from ds4mlx.cuda_port.device import cupy as cp, of_block_bytes
from ds4mlx.cuda_port.forms import Limits

Argument = "cp.ndarray | ctypes.Structure | ctypes._SimpleCData | int | float | None"
Size = tuple[int, ...]

CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
HOPPER = 90  # the first compute capability, times ten, that can overlap


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 3),
                ("rest", ctypes.c_char * 52)]


class _Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)]


def launch(kernel: "cp.RawKernel | None", grid: Size, block: Size, arguments: Sequence[Argument],
           shared_bytes: int = 0) -> None:
    """Run `kernel`, if there is one, on the current stream. Integers are passed as C int, floats as C float, None as a
    null pointer.

    Raises RuntimeError with the driver's error number.
    """
    if kernel is None:
        return
    values = [_c_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    function, stream = ctypes.c_void_p(kernel.kernel.ptr), ctypes.c_void_p(cp.cuda.get_current_stream().ptr)
    grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    if cp.cuda.runtime.is_hip:
        code = _library().hipModuleLaunchKernel(function, *grid, *block, shared_bytes, stream, pointers, None)
    else:
        attribute = _Attribute(id=OVERLAP, value=(1, 0, 0))
        config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_bytes, stream,
                         ctypes.pointer(attribute), int(can_overlap()))
        code = _library().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
    if code:
        raise RuntimeError(f"launching {kernel.name} over {grid} blocks of {block} threads with {shared_bytes} bytes "
                           f"of shared memory failed with driver error {code}")


def active_clusters(kernel: "cp.RawKernel", size: int, threads: int, shared_bytes: int) -> int:
    """How many clusters of `size` blocks of a kernel that is compiled for them run at once; a guess where the driver
    does not tell."""
    found = ctypes.c_int()
    config = _Config((ctypes.c_uint * 3)(size, 1, 1), (ctypes.c_uint * 3)(threads, 1, 1), shared_bytes, None,
                     ctypes.pointer(_Attribute(id=CLUSTER, value=(size, 1, 1))), 1)
    code = _library().cuOccupancyMaxActiveClusters(ctypes.byref(found), ctypes.c_void_p(kernel.kernel.ptr),
                                                   ctypes.byref(config))
    return found.value if code == 0 else processors() * 7 // 8 // size


def _c_value(argument: Argument) -> "ctypes.Structure | ctypes._SimpleCData":
    if argument is None or isinstance(argument, cp.ndarray):
        return ctypes.c_void_p(0 if argument is None else argument.data.ptr)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int(argument) if isinstance(argument, int) else argument


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libamdhip64.so" if cp.cuda.runtime.is_hip else "libcuda.so.1")


@cache
def can_overlap() -> bool:
    """Whether a kernel can begin before the one in front of it has ended."""
    return int(cp.cuda.Device().compute_capability) >= HOPPER


@cache
def limits() -> Limits:
    """Of the current device."""
    attributes, of_block = cp.cuda.Device().attributes, of_block_bytes()
    of_processor = attributes.get("MaxSharedMemoryPerMultiprocessor", 0)    # not all of ROCm's drivers tell
    return Limits(attributes["MultiProcessorCount"], max(of_processor, of_block), of_block)


@cache
def processors() -> int:
    """Multiprocessors of the current device."""
    return limits().processors


def clusters() -> bool:
    """Whether blocks can be launched as clusters that read one another's shared memory."""
    return not cp.cuda.runtime.is_hip and can_overlap()
