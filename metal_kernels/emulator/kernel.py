"""`metal_kernel`: what `mx.fast.metal_kernel` is on a Mac, on a CPU."""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds4mlx.config import cache_dir
from ds4mlx.metal_kernels.emulator import launch, traffic
from ds4mlx.metal_kernels.emulator.arrays import dtype_name, filled, from_host, is_mlx, itemsize, to_host
from ds4mlx.metal_kernels.emulator.build import library
from ds4mlx.metal_kernels.emulator.errors import LimitError, RaceError
from ds4mlx.metal_kernels.emulator.launch import SCHEDULES, Arguments, Library, Order
from ds4mlx.metal_kernels.emulator.source import KernelText, instance, metal_source
from ds4mlx.metal_kernels.emulator.toolchain import Store

if TYPE_CHECKING:
    import mlx.core as mx

    from ds4mlx.metal_kernels.emulator.arrays import Dtype, Input
    from ds4mlx.metal_kernels.emulator.source import Template

log = logging.getLogger(__name__)

MOST_THREADS = 1024  # of a threadgroup
MOST_BUFFERS = 31    # in the argument table of an Apple GPU


@dataclass(frozen=True, slots=True)
class Checks:
    """What is asked of every call of a block."""
    races: bool = False
    debug: bool = False


_checks = Checks()


@contextmanager
def checking(races: bool = False, debug: bool = False) -> Iterator[None]:
    """Within the block every call is made with `check_races=races` and `debug=debug`."""
    global _checks
    before, _checks = _checks, Checks(races, debug)
    try:
        yield
    finally:
        _checks = before


class metal_kernel:  # noqa: N801, the name that MLX gives it
    """A Metal kernel from its text, with the arguments of `mx.fast.metal_kernel`.

    `cache` is the folder for what is compiled, by default one in the user's cache. `compile_options` is accepted and
    changes nothing: arithmetic is IEEE.
    """

    def __init__(self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str,
                 header: str = "", ensure_row_contiguous: bool = True, atomic_outputs: bool = False,
                 compile_options: dict[str, str] | None = None, *, cache: Path | None = None) -> None:
        if not output_names:
            raise ValueError(f"{name}: a kernel has at least one output; none was named")
        self.text = KernelText(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
        self._contiguous = ensure_row_contiguous
        self._cache = cache

    def __call__(self, *, inputs: Sequence[Input], output_shapes: Sequence[tuple[int, ...]],
                 output_dtypes: Sequence[Dtype], grid: tuple[int, int, int], threadgroup: tuple[int, int, int],
                 template: Template | None = None, init_value: float | None = None, verbose: bool = False,
                 stream: object = None, debug: bool = False, check_races: bool = False, strict: bool = True,
                 schedule: str = "forward", seed: int = 1, workers: int | None = None, timeout_s: int = 120,
                 as_mlx: bool = False) -> list[mx.array | np.ndarray]:
        """The outputs, MLX arrays when an input is one or `as_mlx` is set; `stream` is ignored.

        `debug` compiles with checks of array bounds, alignment, shifts, divisions and conversions. `check_races` looks
        for threads that touch the same bytes with no barrier between, and for outputs that differ when threads run
        forward, in reverse or shuffled. `strict` refuses what Apple's compiler would. `verbose` logs the source.
        `timeout_s` is CPU time.

        Raises LimitError, CompileError, StrictError, OutOfBoundsError, DivergenceError, UndefinedBehaviourError,
        EndlessLoopError or RaceError for a fault of the kernel, ValueError for arguments that fit no kernel.
        """
        debug, races = debug or _checks.debug, check_races or _checks.races
        pairs = [to_host(value) for value in inputs]
        dtypes = [dtype_name(dtype) for dtype in output_dtypes]
        self._check(len(pairs), output_shapes, dtypes, grid, threadgroup)
        arrays = [np.asarray(array, order="C") if self._contiguous else array for array, _ in pairs]
        made = instance(self.text, arrays, [name for _, name in pairs], dtypes, template or ())
        if made.buffers > MOST_BUFFERS:
            raise LimitError(f"{self.text.name}: {made.buffers} buffers, shapes included; {MOST_BUFFERS} are allowed")
        if verbose:
            log.info("%s", metal_source(self.text, made))
        sizes = [int(np.prod(shape, dtype=np.int64)) * itemsize(dtype)
                 for shape, dtype in zip(output_shapes, dtypes, strict=True)]
        outputs = tuple((name, filled(size, dtype, init_value))
                        for name, size, dtype in zip(self.text.outputs, sizes, dtypes, strict=True))
        arguments = Arguments(self.text.name, tuple(self._buffers(arrays)), outputs, tuple(map(int, grid)),
                              tuple(map(int, threadgroup)))
        order = Order(schedule, seed, workers or os.cpu_count() or 1, timeout_s)
        build = partial(library, _store(self._cache), self.text, made, is_strict=strict)
        raw = self._run(build, arguments, order, debug, races)
        as_mlx = as_mlx or any(map(is_mlx, inputs))
        return [from_host(*output, as_mlx) for output in zip(raw, dtypes, output_shapes, strict=True)]

    def _check(self, n_inputs: int, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str],
               grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> None:
        for found, names, what in ((n_inputs, self.text.inputs, "inputs"), (len(shapes), self.text.outputs, "shapes"),
                                   (len(dtypes), self.text.outputs, "dtypes")):
            if found != len(names):
                raise ValueError(f"{self.text.name}: {found} {what} given for {len(names)}: {', '.join(names)}")
        if min(*grid, *threadgroup) < 1:
            raise ValueError(f"{self.text.name}: grid {grid} and threadgroup {threadgroup} must be positive")
        threads = int(np.prod([min(pair) for pair in zip(grid, threadgroup, strict=True)]))
        if threads > MOST_THREADS:
            raise LimitError(f"{self.text.name}: a threadgroup of {threadgroup} has {threads} threads, {MOST_THREADS} "
                             "are allowed")

    def _buffers(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Inputs, each followed by what the body wants to know of its shape."""
        for name, array in zip(self.text.inputs, arrays, strict=True):
            yield name, array
            for info in self.text.shape_info(name) if array.ndim else ():
                values = {"shape": (array.shape, np.int32), "ndim": ((array.ndim,), np.int32),
                          "strides": ([stride // array.itemsize for stride in array.strides], np.int64)}
                yield f"{name}_{info}", np.array(*values[info])

    def _run(self, build: Callable[[str], Library], arguments: Arguments, order: Order, debug: bool, races: bool
             ) -> list[np.ndarray]:
        """The outputs' bytes: of a plain or a debug build, unless a counted one was all that was asked for."""
        host = launch.runtime(_store(self._cache))
        if races or traffic.wanted():
            raw, counted = launch.run(host, build("watch"), arguments, replace(order, find_races=races))
            traffic.record(counted)
            if not debug and not races:
                return raw
        compiled = build("flat" if debug else "plain")
        schedules = SCHEDULES if races else (order.schedule,)
        results = [launch.run(host, compiled, arguments, replace(order, schedule=schedule))[0]
                   for schedule in schedules]
        for schedule, result in zip(schedules[1:], results[1:], strict=True):
            for name, first, other in zip(self.text.outputs, results[0], result, strict=True):
                if (first != other).any():
                    raise RaceError(f"{self.text.name}: output '{name}' differs between threads run forward and "
                                    f"{schedule}: a missing barrier, or an order of additions?")
        return results[0]


@cache
def _store(folder: Path | None) -> Store:
    return Store.open(folder or cache_dir() / "metal-emulator")
