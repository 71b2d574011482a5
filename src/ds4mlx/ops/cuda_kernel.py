"""A CUDA kernel through MLX: an entry of cuda_port/kernels, called by a kernel of MLX's arguments.

The text is the one that cuda_port compiles, in which kernels become functions, and behind it `NAME(inputs…, outputs…,
sizes…) { body }`, whose body calls one of them. Numbers reach it as macros, or as sizes of inputs (`x_shape[0]`).
MLX's `cuda_kernel` would compile such a text itself, but with headers that take it two seconds, one after another, in
every process anew: so NVRTC is called by `card`, and MLX launches what it made.

Blocks never run as clusters here. MLX keeps its graphs by what depends on what and updates one for other kernels, and
an update leaves a node's clusters as they were: a kernel without them would run in those of the one before it.
"""
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import mlx.core as mx

from ds4mlx.cuda_port.source import Defines, source
from ds4mlx.ops import card
from ds4mlx.ops.kernel import Output, Size

# What MLX reads when it first computes: it stops for good behind 800 forms of graphs, however often each came back, and
# rounds the factors of float32 products to 11 bits.
GRAPHS = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
EXACT = {"MLX_ENABLE_TF32": "0"}
TYPES = {mx.float32: "float", mx.float16: "__half", mx.int32: "int", mx.uint8: "unsigned char"}
SIZE = re.compile(r"\b(\w+)_shape\[(\d)\]")
# Kernels become functions, whose attributes are the outer kernel's.
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
extern "C" __attribute__((global)) __attribute__((launch_bounds({threads}, {blocks}))) void """

Observer = Callable[["CudaKernel", Sequence[mx.array], Sequence[Output], Size, Size], None]
_observers: list[Observer] = []
_compiled: dict[str, bytes] = {}


@dataclass(frozen=True)
class CudaKernel:
    """Get it from `kernel`, call it to launch it."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str
    sizes: tuple[tuple[int, int], ...]      # that the body asks for: of which input, along which axis
    shared_bytes: int
    threads: int

    def __call__(self, inputs: Sequence[mx.array], outputs: Sequence[Output], groups: Sequence[int]) -> list[mx.array]:
        """The outputs, in order, of up to three dimensions of blocks."""
        groups, threads = (*groups, 1, 1)[:3], (self.threads, 1, 1)
        if _observers:
            for observer in _observers:
                observer(self, inputs, outputs, groups, threads)
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]
        if self.name not in _compiled:
            _compiled[self.name] = card.compiled(self.text(inputs, outputs))
        return mx.fast.precompiled_cuda_kernel(
            name=self.name, compiled_source=_compiled[self.name], inputs=list(inputs),
            output_shapes=[shape for shape, _ in outputs], output_dtypes=[dtype for _, dtype in outputs],
            scalars=[inputs[i].shape[axis] for i, axis in self.sizes],
            grid=(groups[0] * self.threads, groups[1], groups[2]), threadgroup=threads,
            shared_memory=self.shared_bytes, ensure_row_contiguous=True)

    def __hash__(self) -> int:
        return hash(self.name)

    def text(self, inputs: Sequence[mx.array], outputs: Sequence[Output]) -> str:
        """What is compiled, for arrays of these types."""
        parameters = [f"const {TYPES[a.dtype]}* {name}" for name, a in zip(self.inputs, inputs, strict=True)]
        parameters += [f"{TYPES[dtype]}* {name}" for name, (_, dtype) in zip(self.outputs, outputs, strict=True)]
        parameters += [f"int {self.inputs[i]}_shape_{axis}" for i, axis in self.sizes]
        body = SIZE.sub(r"\1_shape_\2", self.body)
        return f"{self.header}{self.name}({', '.join(parameters)}) {{\n{body}\n}}\n"


@cache
def kernel(stem: str, call: str, inputs: tuple[str, ...], outputs: tuple[str, ...], defines: Defines = (),
           threads: int = 256, blocks: int = 1, shared_bytes: int = 0) -> CudaKernel:
    """The kernel whose body is `call` to entries of cuda_port/kernels/STEM.cu, compiled with macros.

    `call`, one or more statements in C++, knows inputs and outputs as pointers, and sizes as NAME_shape[i].
    blocks: that are to share a multiprocessor; shared_bytes: dynamic shared memory.
    """
    macros = "".join(f"#define {name} {value}\n" for name, value in defines)
    header = AS_FUNCTIONS + macros + source(stem) + AS_KERNEL.format(threads=threads, blocks=blocks)
    sizes = sorted({(inputs.index(name), int(axis)) for name, axis in SIZE.findall(call)})
    # MLX keeps what it has loaded by name, with the shared memory it was first launched with.
    mark = sha256(repr((header, call, inputs, outputs, shared_bytes)).encode()).hexdigest()[:16]
    return CudaKernel(f"ds4_{stem}_{mark}", inputs, outputs, header, call, tuple(sizes), shared_bytes, threads)


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


@contextmanager
def prepared() -> Iterator[None]:
    """Within the block nothing is launched; behind it all that would have been is compiled, by all processors."""
    texts: dict[str, str] = {}

    def note(k: CudaKernel, inputs: Sequence[mx.array], outputs: Sequence[Output], groups: Size, threads: Size) -> None:
        if k.name not in _compiled and k.name not in texts:
            texts[k.name] = k.text(inputs, outputs)

    with observe(note):
        yield
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        _compiled.update(zip(texts, pool.map(card.compiled, texts.values()), strict=True))
