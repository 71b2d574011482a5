"""A CUDA kernel through MLX: an entry of cuda_port/kernels, called by the kernel that MLX writes around it.

MLX writes `__global__ void NAME(inputs…, outputs…) { body }` behind a header. The header here is the same text that
cuda_port compiles, in which kernels become functions; the body calls one of them. Numbers reach it as macros, or as
sizes of inputs (`x_shape[0]`): a number of its own would be an array, read over the bus.
"""
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, byref, c_int
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import mlx.core as mx

from ds4mlx.cuda_port.forms import Limits
from ds4mlx.cuda_port.source import Defines, source
from ds4mlx.ops.kernel import Output, Size

HOPPER = Limits(132, 233472, 232448)
ATTRIBUTES = 16, 81, 97     # of the driver: multiprocessors, shared memory of one of them, and of a block at most
CAPABILITY = 75             # of the driver: the compute capability's first number
# Kernels become functions, whose attributes are the outer kernel's; then what MLX writes is one again.
AS_FUNCTIONS = """#include <cuda_fp16.h>
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#define __global__ __device__ __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
"""
AS_KERNEL = """
#undef __global__
#undef __grid_constant__
#define __global__ __attribute__((global)) __attribute__((launch_bounds({threads}, {blocks}))){cluster}
#define __grid_constant__ __attribute__((grid_constant))
"""

Observer = Callable[["CudaKernel", Sequence[mx.array], Sequence[Output], Size, Size], None]
_observers: list[Observer] = []


@dataclass(frozen=True)
class CudaKernel:
    """Get it from `kernel`, call it to launch it."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str
    shared_bytes: int
    threads: int

    def __call__(self, inputs: Sequence[mx.array], outputs: Sequence[Output], groups: Sequence[int]) -> list[mx.array]:
        """The outputs, in order, of up to three dimensions of blocks."""
        groups, threads = (*groups, 1, 1)[:3], (self.threads, 1, 1)
        if _observers:
            for observer in _observers:
                observer(self, inputs, outputs, groups, threads)
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]
        grid = groups[0] * self.threads, groups[1], groups[2]
        return _compiled(self)(inputs=list(inputs), grid=grid, threadgroup=threads,
                               output_shapes=[shape for shape, _ in outputs], output_dtypes=[d for _, d in outputs])

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def kernel(stem: str, call: str, inputs: tuple[str, ...], outputs: tuple[str, ...], defines: Defines = (),
           threads: int = 256, blocks: int = 1, shared_bytes: int = 0, cluster: int = 1) -> CudaKernel:
    """The kernel whose body is `call` to entries of cuda_port/kernels/STEM.cu, compiled with macros.

    `call`, one or more statements in C++, knows inputs and outputs as pointers, and sizes as NAME_shape[i].
    blocks: that are to share a multiprocessor; shared_bytes: dynamic shared memory; cluster: blocks side by side that
    run together.
    """
    macros = "".join(f"#define {name} {value}\n" for name, value in defines)
    together = f" __attribute__((cluster_dims({cluster}, 1, 1)))" if cluster > 1 else ""
    header = AS_FUNCTIONS + macros + source(stem) + AS_KERNEL.format(threads=threads, blocks=blocks, cluster=together)
    # MLX keeps what it has compiled by name, on disk too: another text has another one.
    mark = sha256("\0".join([header, call, *inputs, *outputs]).encode()).hexdigest()[:16]
    return CudaKernel(f"ds4_{stem}_{mark}", inputs, outputs, header, call, shared_bytes, threads)


@cache
def zeros(count: int) -> mx.array:
    """i32, for tables of one page or slot."""
    made = mx.zeros(count, mx.int32)
    mx.eval(made)
    return made


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Within the block nothing is launched: `observer` sees what would be, and outputs are zeros."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@cache
def limits() -> Limits:
    """Of the card; of a Hopper card where there is none."""
    found = [_attribute(which) for which in ATTRIBUTES]
    return Limits(*found) if None not in found else HOPPER


@cache
def clusters() -> bool:
    """Whether blocks can run as clusters."""
    return (_attribute(CAPABILITY) or 9) >= 9


def _attribute(which: int) -> int | None:
    """Of the first card, None where there is none."""
    try:
        driver, value = CDLL("libcuda.so.1"), c_int()
    except OSError:
        return None
    return None if driver.cuInit(0) or driver.cuDeviceGetAttribute(byref(value), which, 0) else value.value


@cache
def _compiled(k: CudaKernel) -> Callable[..., list[mx.array]]:
    return mx.fast.cuda_kernel(name=k.name, input_names=list(k.inputs), output_names=list(k.outputs), source=k.body,
                               header=k.header, shared_memory=k.shared_bytes)
