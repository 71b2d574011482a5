"""A Metal kernel: its text, and the one way to launch it, on a Mac or in the emulator.

`metal_kernels/STEM.metal` holds one or more kernels of an op. Above the first line `// ---- kernel NAME` is what they
share (functions, tables, `#include` of headers beside it); below each such line is one kernel's body, as MLX wants it.
Sizes of the model come in as template arguments, what changes from call to call as inputs.
"""
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import mlx.core as mx
import numpy as np

from ds4mlx.ops.dispatch import emulated

Input = mx.array | np.ndarray | int | float | bool
Template = Sequence[tuple[str, int | bool | mx.Dtype]]
Output = tuple[tuple[int, ...], mx.Dtype]
Size = tuple[int, int, int]

_ENTRY = re.compile(r"(?m)^// ---- kernel (\w+)\n")
_INCLUDE = re.compile(r'(?m)^#include "(\w+\.h)"\n')
_observers: list[Callable[["Launch"], list[mx.array] | None]] = []


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch was asked to do; `groups` counts threadgroups, `threads` those of one group."""
    kernel: str
    buffers: tuple[str, ...]     # names of the inputs
    inputs: tuple[Input, ...]
    template: tuple[tuple[str, int | bool | mx.Dtype], ...]
    groups: Size
    threads: Size
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel of a .metal file with the names of its buffers. Get it from `kernel`, call it to launch it."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str

    def __call__(self, inputs: Sequence[Input], outputs: Sequence[Output], groups: Size, threads: Size,
                 template: Template = ()) -> list[mx.array]:
        """The outputs, in order. Whole threadgroups only: the body checks edges of the data, never of the grid."""
        launch = Launch(self.name, self.inputs, tuple(inputs), tuple(template), groups, threads, tuple(outputs))
        for observer in _observers:
            replaced = observer(launch)
            if replaced is not None:
                return replaced
        make = _emulated if emulated() else _compiled
        grid = tuple(g * t for g, t in zip(groups, threads, strict=True))
        return make(self)(inputs=list(inputs), template=list(template), grid=grid, threadgroup=threads,
                          output_shapes=[shape for shape, _ in outputs], output_dtypes=[d for _, d in outputs])


@cache
def kernel(stem: str, entry: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
           defines: tuple[tuple[str, int], ...] = ()) -> Kernel:
    """Kernel `entry` of metal_kernels/STEM.metal, with its buffers' names in order and macros for its text."""
    shared, *rest = _ENTRY.split(_text(f"{stem}.metal"))
    bodies = dict(zip(rest[::2], rest[1::2], strict=True))
    macros = "".join(f"#define {name} {value}\n" for name, value in defines)
    name = "_".join([stem, entry, *(f"{name.lower()}{value}" for name, value in defines)])
    header = macros + _INCLUDE.sub(lambda match: _text(match[1]), shared)
    return Kernel(name, inputs, outputs, header, bodies[entry])


@contextmanager
def observe(observer: Callable[[Launch], list[mx.array] | None]) -> Iterator[None]:
    """Within the block `observer` sees every launch; if it returns arrays, they are the outputs and nothing runs."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@cache
def _text(file: str) -> str:
    """The same in a wheel and a checkout."""
    return files("ds4mlx.metal_kernels").joinpath(file).read_text(encoding="ascii")


@cache
def _compiled(k: Kernel) -> Callable[..., list[mx.array]]:
    return mx.fast.metal_kernel(name=k.name, input_names=list(k.inputs), output_names=list(k.outputs), header=k.header,
                                source=k.body)


@cache
def _emulated(k: Kernel) -> Callable[..., list[mx.array]]:
    from ds4mlx.metal_kernels.emulator import metal_kernel
    return metal_kernel(name=k.name, input_names=list(k.inputs), output_names=list(k.outputs), header=k.header,
                        source=k.body)
