"""Tries every Metal kernel: compiles it, compares it with the reference, and on a GPU times it.

The reference is computed by the CPU, so that nothing of the GPU is in it. Not run on a Mac yet.
"""
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine.isolated import Child, ChildDied
from ds4mlx.engine.mlx_kernel_cases import SIZES, Call, Case, cases
from ds4mlx.engine.mlx_kernel_checks import Difference, Near
from ds4mlx.engine.mlx_plan import least_bytes
from ds4mlx.metal_kernels.emulator import NoCompilerError
from ds4mlx.ops.kernel import Launch, observe

Implementation = Literal["metal", "metal-emulated"]

SEED = 7
SPILL_BYTES = 256 << 20     # that calls in turn read, so that no cache of a chip holds it from one round to the next
MOST_INPUTS = 32            # sets of inputs, where those are small: activations are in the cache in a real token too
BATCH_S, MOST_CALLS = 0.02, 256     # that one measurement should take, and its calls at most
BATCH_BYTES = 1 << 30       # of outputs, which are all alive at once
BATCHES = 9
COPY_FLOATS = 1 << 27       # 512 MiB, read and written
PUBLISHED_GB_S = {          # of the largest chip that goes by the name
    "Apple M1": 68, "Apple M1 Pro": 200, "Apple M1 Max": 400, "Apple M1 Ultra": 800,
    "Apple M2": 100, "Apple M2 Pro": 200, "Apple M2 Max": 400, "Apple M2 Ultra": 800,
    "Apple M3": 100, "Apple M3 Pro": 150, "Apple M3 Max": 400, "Apple M3 Ultra": 819,
    "Apple M4": 120, "Apple M4 Pro": 273, "Apple M4 Max": 546}


@dataclass(frozen=True, slots=True)
class Machine:
    """What a report says of where it was made: nothing that names its owner."""
    device: str
    memory_bytes: int | None
    system: str
    mlx: str
    copy_gb_s: float | None         # that MLX's own copy of a large array reaches, read and written
    published_gb_s: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """One case. A time is that of one call among many that do not wait for each other."""
    name: str
    kernels: tuple[str, ...]
    passed: bool
    fault: str                      # of the compiler, or of what else kept the kernel from an answer; else empty
    outputs: tuple[Difference, ...]
    reasons: tuple[str, ...]        # for the tolerance of each output
    least_bytes: int                # read and written once by each launch
    microseconds: float | None = None

    @property
    def gb_s(self) -> float | None:
        return self.least_bytes / self.microseconds / 1e3 if self.microseconds else None

    @property
    def worst(self) -> Difference | None:
        """The output that is furthest off, by its own tolerance."""
        return max(self.outputs, key=_badness, default=None)


def _badness(d: Difference) -> tuple[bool, float]:
    return not d.passed, float("inf") if d.error is None else d.error / (d.tolerance or 1)


def has_metal() -> bool:
    return ops.device() == "metal"


def names(sizes: str, only: str = "") -> list[str]:
    """The names of the cases whose name has `only` in it."""
    return [case.name for case in _chosen(sizes, only)]


def check_all(sizes: str, implementation: Implementation, only: str = "") -> Iterator[Result]:
    """The cases of SIZES[sizes] that `names` gives, one after another; timed on a GPU. What goes wrong in one is in
    its result. A GPU's faults end the process, so there the cases have one of their own."""
    if implementation == "metal":
        return _isolated(sizes, implementation, only)
    return (check(case, implementation) for case in _chosen(sizes, only))


def _isolated(sizes: str, implementation: Implementation, only: str) -> Iterator[Result]:
    with Child() as child:
        for i, case in enumerate(_chosen(sizes, only)):
            try:
                yield child.call(_check_one, sizes, implementation, only, i)
            except ChildDied as fault:
                yield _failed(case, (), str(fault))


def _check_one(sizes: str, implementation: Implementation, only: str, i: int) -> Result:
    return check(_chosen(sizes, only)[i], implementation, timed=implementation == "metal")


def _chosen(sizes: str, only: str) -> list[Case]:
    return [case for case in cases(SIZES[sizes]) if only in case.name]


def check(case: Case, implementation: Implementation, timed: bool = False) -> Result:
    """Runs the case by the reference and by the kernels. Raises NoCompilerError where the emulator lacks one."""
    launches: list[Launch] = []
    try:
        call = case.build(np.random.default_rng(SEED))
        with ops.only("reference"), mx.stream(mx.cpu):
            expected = _values(call)
        with ops.only(implementation, exact=case.exact), observe(launches.append):
            found = _values(call)
        if not launches:
            raise RuntimeError("no kernel was launched: these shapes are left to the reference")
        outputs = tuple(_compared(case, found, expected))
        passed, least = all(d.passed for d in outputs), sum(map(least_bytes, launches))
        result = Result(case.name, _kernels(launches), passed, "", outputs, tuple(c.reason for c in case.checks), least)
        if timed:
            with ops.only(implementation, exact=case.exact):
                result = replace(result, microseconds=_microseconds(case, least, sum(a.nbytes for a in found)))
        return result
    except NoCompilerError:
        raise
    except Exception as fault:  # whatever a kernel does, the next one has its turn
        return _failed(case, _kernels(launches), f"{type(fault).__name__}: {fault}")


def _failed(case: Case, kernels: tuple[str, ...], fault: str) -> Result:
    fault = fault.replace(str(Path.home()), "~")    # a compiler may name files
    return Result(case.name, kernels, False, fault, (), tuple(check.reason for check in case.checks), 0)


def _kernels(launches: Sequence[Launch]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(launch.kernel for launch in launches))


def _values(call: Call) -> list[np.ndarray]:
    outputs = list(call())
    mx.eval(outputs)
    return [np.array(a) for a in outputs]


def _compared(case: Case, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Iterator[Difference]:
    for check, one, other in zip(case.checks, found, expected, strict=True):
        alike = one.shape == other.shape or isinstance(check, Near) and check.parts
        if one.dtype != other.dtype or not alike:
            raise RuntimeError(f"the kernel gives {one.dtype} {one.shape}, the reference {other.dtype} {other.shape}")
        yield check(one, other)


def _microseconds(case: Case, least: int, written: int) -> float:
    """Median over batches of calls that do not depend on each other: one call would measure how long it takes to be
    launched. They take turns with several sets of inputs."""
    sets = max(1, min(MOST_INPUTS, -(-SPILL_BYTES // max(least, 1))))
    calls = [case.build(np.random.default_rng(SEED + i)) for i in range(sets)]
    for call in calls:
        mx.eval(call())
    most = max(1, min(MOST_CALLS, BATCH_BYTES // max(written, 1)))
    once = _batch_s(calls, min(most, sets)) / min(most, sets)
    count = max(1, min(most, round(BATCH_S / once)))
    return median(_batch_s(calls, count) for _ in range(BATCHES)) / count * 1e6


def _batch_s(calls: Sequence[Call], count: int) -> float:
    graphs = [calls[i % len(calls)]() for i in range(count)]
    before = perf_counter()
    mx.eval(graphs)
    return perf_counter() - before


def machine(implementation: Implementation) -> Machine:
    """This one; on a GPU with the bandwidth that it has for a copy."""
    info = mx.device_info()
    name, memory = str(info.get("device_name", "unknown")), info.get("memory_size")
    system = f"macOS {platform.mac_ver()[0]}" if platform.mac_ver()[0] else platform.system()
    copied = None
    if implementation == "metal":
        with Child() as child:
            copied = child.call(copy_gb_s)
    return Machine(name, int(memory) if memory else None, f"{system} {platform.machine()}", mx.__version__, copied,
                   PUBLISHED_GB_S.get(name))


def copy_gb_s(floats: int = COPY_FLOATS) -> float:
    """GB/s of the best of some copies of an array, its bytes counted twice."""
    a = mx.arange(floats, dtype=mx.float32)
    mx.eval(a)
    best = float("inf")
    for _ in range(BATCHES):
        b = a + 1
        before = perf_counter()
        mx.eval(b)
        best = min(best, perf_counter() - before)
    return 2 * a.nbytes / best / 1e9
