"""One launch: buffers in place, the runtime called, its report turned into an exception or into traffic."""
from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds4mlx.metal_kernels.emulator.errors import (
    DivergenceError, EmulatorError, EndlessLoopError, LimitError, OutOfBoundsError, RaceError, UndefinedBehaviourError)
from ds4mlx.metal_kernels.emulator.memory import Guarded, guarded
from ds4mlx.metal_kernels.emulator.toolchain import Store
from ds4mlx.metal_kernels.emulator.traffic import BufferTraffic, Moved, Traffic

IN_PLACE_ABOVE = 64 << 20  # bytes: larger inputs are not copied into guarded memory, so their ends are not watched
ALIGNMENT = 16              # bytes, of the widest vector a kernel may load
SCHEDULES = ("forward", "reverse", "shuffle")
TABLES = "(tables)"
_FAULTS: dict[int, type[EmulatorError]] = {
    1: OutOfBoundsError, 2: DivergenceError, 3: UndefinedBehaviourError, 4: EndlessLoopError, 6: RaceError,
    7: LimitError}
_running = threading.Lock()  # the runtime's state is one for the process


class _Range(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 64), ("lo", ctypes.c_void_p), ("hi", ctypes.c_void_p),
                ("is_written", ctypes.c_int32)]


class _Report(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("pc", ctypes.c_uint64), ("other_pc", ctypes.c_uint64),
                ("group_memory", ctypes.c_uint64), ("text", ctypes.c_char * 1600)]


class _Traffic(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64 * 2) for name in ("requested", "group", "distinct")]


class _Job(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("buffers", ctypes.c_void_p), ("ranges", ctypes.POINTER(_Range)),
                ("n_buffers", ctypes.c_int32), ("grid", ctypes.c_uint32 * 3), ("threadgroup", ctypes.c_uint32 * 3),
                ("workers", ctypes.c_int32), ("schedule", ctypes.c_int32), ("seed", ctypes.c_int32),
                ("timeout_s", ctypes.c_int32), ("find_races", ctypes.c_int32), ("traffic", ctypes.c_void_p),
                ("report", ctypes.POINTER(_Report))]


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled kernel."""
    path: Path
    loaded: ctypes.CDLL
    is_watched: bool


@dataclass(frozen=True, slots=True)
class Order:
    """How threads are run: in which order, by how many processes, for how much CPU time."""
    schedule: str
    seed: int
    workers: int
    timeout_s: int
    find_races: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """Inputs (name, array) and outputs (name, bytes before the launch), both in the order of the signature."""
    kernel: str
    inputs: tuple[tuple[str, np.ndarray], ...]
    outputs: tuple[tuple[str, np.ndarray], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    @property
    def groups(self) -> tuple[int, int, int]:
        """Threadgroups on each axis; the last may be cut short by the grid."""
        return tuple(-(-threads // min(threads, size))
                     for threads, size in zip(self.grid, self.threadgroup, strict=True))

    @property
    def group_threads(self) -> int:
        """Threads of a whole threadgroup."""
        return int(np.prod([min(pair) for pair in zip(self.grid, self.threadgroup, strict=True)]))


_runtime: ctypes.CDLL | None = None


def runtime(store: Store) -> ctypes.CDLL:
    """The library that runs kernels, for all to see: kernels find their functions in it. One for the process."""
    global _runtime
    if _runtime is None:
        _runtime = _load_runtime(store)
    return _runtime


def _load_runtime(store: Store) -> ctypes.CDLL:
    library = ctypes.CDLL(str(store.runtime()), mode=ctypes.RTLD_GLOBAL)
    library.msl_alloc.restype = ctypes.c_void_p
    library.msl_alloc.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    library.msl_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.msl_run.argtypes = [ctypes.POINTER(_Job)]
    return library


def load(path: Path, is_watched: bool) -> Library:
    """Raises EmulatorError when it needs a function that the runtime lacks."""
    try:
        return Library(path, ctypes.CDLL(str(path)), is_watched)
    except OSError as fault:
        raise EmulatorError(f"the compiled kernel cannot be loaded: {fault}; remove {path} and try again") from fault


def run(host: ctypes.CDLL, library: Library, arguments: Arguments, order: Order
        ) -> tuple[list[np.ndarray], Traffic | None]:
    """The outputs' bytes, and the traffic of a watched library. Raises what the kernel did wrong."""
    with ExitStack() as stack:
        ranges: list[tuple[str, int, int]] = []
        guards: list[Guarded] = []

        def place(name: str, data: np.ndarray) -> None:
            aligned = data.ctypes.data % ALIGNMENT == 0  # MLX's own CPU memory is not; a Metal buffer always is
            if not data.flags.c_contiguous or data.nbytes > IN_PLACE_ABOVE and aligned:
                ranges.append((name, data.ctypes.data, _extent_bytes(data)))
                return
            buffer = stack.enter_context(guarded(host, name, data.nbytes))
            buffer.bytes[:] = data.reshape(-1).view(np.uint8)
            ranges.append((name, buffer.address, data.nbytes))
            guards.append(buffer)

        for name, data in arguments.inputs:
            place(name, data)
        inputs = len(guards)
        for name, data in arguments.outputs:
            buffer = stack.enter_context(guarded(host, name, data.size))
            buffer.bytes[:] = data
            ranges.append((name, buffer.address, data.size))
            guards.append(buffer)
        traffic = _call(host, library, arguments, order, ranges)
        for guard in guards:
            guard.check()
        return [guard.bytes.copy() for guard in guards[inputs:]], traffic


def _extent_bytes(data: np.ndarray) -> int:
    """From an array's first byte to its last, gaps of a view included."""
    steps = (stride * (size - 1) for stride, size in zip(data.strides, data.shape, strict=True))
    return sum(steps) + data.itemsize if data.size else 0


def _call(host: ctypes.CDLL, library: Library, arguments: Arguments, order: Order,
          buffers: Sequence[tuple[str, int, int]]) -> Traffic | None:
    spans = [*buffers, *([(TABLES, *_mapped(library.path))] if library.is_watched else [])]
    outputs = {name for name, _ in arguments.outputs}
    ranges = (_Range * len(spans))(*[_Range(name.encode()[:63], at, at + size, name in outputs)
                                     for name, at, size in spans])
    pointers = (ctypes.c_void_p * len(buffers))(*[at for _, at, _ in buffers])
    counts, report = (_Traffic * (len(spans) + 1))(), _Report()
    job = _Job(ctypes.cast(library.loaded.msl_entry, ctypes.c_void_p), ctypes.cast(pointers, ctypes.c_void_p), ranges,
               len(spans), (ctypes.c_uint32 * 3)(*arguments.grid), (ctypes.c_uint32 * 3)(*arguments.threadgroup),
               1 if order.find_races else order.workers, SCHEDULES.index(order.schedule), order.seed, order.timeout_s,
               order.find_races, ctypes.cast(counts, ctypes.c_void_p) if library.is_watched else None,
               ctypes.pointer(report))
    with _running:
        result = host.msl_run(ctypes.byref(job))
    if result < 0:
        raise EmulatorError(f"{arguments.kernel}: no worker process could be started; free some memory and try again")
    if result:
        raise _fault(arguments.kernel, library.path, report)
    return _traffic(arguments, spans, counts, report) if library.is_watched else None


def _fault(kernel: str, path: Path, report: _Report) -> EmulatorError:
    message = f"{kernel}: {report.text.decode(errors='replace')}{_line(path, report.pc, ' at ')}"
    return _FAULTS.get(report.kind, EmulatorError)(message + _line(path, report.other_pc, ', the other at '))


def _traffic(arguments: Arguments, spans: Sequence[tuple[str, int, int]], counts: ctypes.Array[_Traffic],
             report: _Report) -> Traffic:
    def moved(count: _Traffic, way: int) -> Moved:
        return Moved(count.requested[way], count.group[way], count.distinct[way])

    buffers = {name: BufferTraffic(size, moved(count, 0), moved(count, 1))
               for (name, _, size), count in zip(spans, counts, strict=False)
               if name != TABLES or count.requested[0]}
    group_memory = counts[len(spans)].requested
    return Traffic(arguments.kernel, int(np.prod(arguments.groups)), arguments.group_threads, report.group_memory,
                   buffers, group_memory[0], group_memory[1])


def _mappings(path: Path) -> list[tuple[int, int]]:
    """Where the parts of a loaded file lie in memory."""
    spans = []
    for row in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = row.split(None, 5)
        if name == str(path):
            spans.append(tuple(int(address, 16) for address in span.split("-")))
    return spans


def _mapped(path: Path) -> tuple[int, int]:
    spans = _mappings(path)
    return spans[0][0], spans[-1][1] - spans[0][0]


def _line(path: Path, pc: int, before: str) -> str:
    """The kernel's line at an instruction, after `before`; empty when it is unknown."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    span = next((span for span in _mappings(path) if span[0] <= pc < span[1]), None)
    if not tool or not span:
        return ""
    command = [tool, "-i", "-e", str(path), hex(pc - _mappings(path)[0][0])]
    for place in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
        if ".source:" in place or ".header:" in place:
            return before + Path(place.split(" ")[0]).name
    return ""
