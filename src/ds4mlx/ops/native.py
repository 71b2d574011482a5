"""Matrix products for the CPU: `native.cpp` where a compiler built it, NumPy's BLAS over decoded slabs elsewhere.

MLX's Linux wheel brings an unoptimised BLAS: a 175 x 4096 by 4096 x 2048 product takes 1.26 s against NumPy's 0.018 s
on two cores. These functions leave MLX's graph: they take and give NumPy arrays, and weights stay where they are, which
may be the mapped file.
"""
import ctypes
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from math import prod

import mlx.core as mx
import numpy as np

from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.gguf.dequant import IQ2_GRID, IQ2_SIGNS, dequantize

log = logging.getLogger(__name__)

Weights = tuple[np.ndarray, str]                # blocks u8 and their GGUF type
Shared = tuple[np.ndarray, np.ndarray, str]     # gate, up and the type of both

VERSION = 3     # of the functions in native.cpp
GROUP = 32      # weights that native.cpp takes at a time: rows of F16, BF16 and F32 may be no multiple of it
SLAB_WEIGHTS = 1 << 21  # decoded at once for NumPy on a core: 8 MiB of float32, near the cache and small beside a model


def built() -> bool:
    """Whether `native.cpp` was built with this installation and loads."""
    return functions() is not None


def describe() -> str:
    """What computes products here, in words for a report."""
    library = functions()
    if library is None:
        return "NumPy (native.cpp is not built: install again with a C++ compiler for speed)"
    return f"native.cpp with {library.ds4mlx_instructions(1).decode()} on {cores()} threads"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def array(x: mx.array) -> np.ndarray:
    """x as float32 in host memory, without a copy where it is that already."""
    x = x.astype(mx.float32)
    mx.eval(x)
    return np.array(x, copy=False)


def matmul(x: np.ndarray, blocks: np.ndarray, kind: str, groups: int = 1, *, simd: bool = True,
           threads: int | None = None) -> np.ndarray:
    """y = x W^T.  x [T, K] f32; blocks [N, row bytes] u8 of the GGUF type `kind`. Returns [T, N] f32.

    With `groups` G > 1, x is [T, G, K] and W's rows are G consecutive parts, part g applied to x[:, g]; N counts all.
    `simd` False takes the plain C++; `threads` None all cores. Neither changes what NumPy does without native.cpp.
    """
    n, width = blocks.shape[0], x.shape[-1]
    stack = blocks.reshape(groups, n // groups, -1)
    library = functions()
    if library is None or width % GROUP:
        return _numpy_matmul(x, stack, kind)
    x, y = floats(x), np.empty((x.shape[0], n), np.float32)
    library.ds4mlx_matmul(runner(simd, threads), _Stack.of(stack, kind, width), x.shape[0],
                          address_of(x), groups * width, width, address_of(y), n, n // groups)
    return y


def product(a: mx.array, b: mx.array) -> mx.array:
    """a @ b in float32.  a [..., M, K]; b [K, N] for all of a, or [..., K, N] with a's leading axes."""
    a, b = array(a), array(b)
    (k, n), batch = b.shape[-2:], prod(b.shape[:-2])
    a, shape = a.reshape(batch, -1, k), (*a.shape[:-1], n)
    library = functions()
    if library is None:
        return mx.array((a @ b.reshape(batch, k, n)).reshape(shape))
    x = np.ascontiguousarray(np.pad(a, ((0, 0), (0, 0), (0, -k % GROUP))))
    w = np.zeros((batch, n, x.shape[2]), np.float32)
    w[..., :k] = b.reshape(batch, k, n).swapaxes(1, 2)
    y = np.empty((*x.shape[:2], n), np.float32)
    library.ds4mlx_matmul(runner(), _Stack.of(w.view(np.uint8), "F32", x.shape[2]), x.shape[1],
                          address_of(x), x.shape[2], x.shape[1] * x.shape[2], address_of(y), n, x.shape[1] * n)
    return mx.array(y.reshape(shape))


def gate_up(x: np.ndarray, selected: np.ndarray, weight: np.ndarray, gate: np.ndarray, gate_kind: str, up: np.ndarray,
            up_kind: str, limit: float, shared: Shared | None = None, *, simd: bool = True,
            threads: int | None = None) -> np.ndarray:
    """mid[t, s] = weight[t, s] silu(min(W1[e] x[t], limit)) clamp(W3[e] x[t], -limit, limit) for e = selected[t, s].

    x [T, D] f32; selected [T, S] i32; weight [T, S] f32; gate, up stacks [E, F, row bytes] u8. `shared`, of
    [F, row bytes], is one more slot with weight 1. Returns [T, S, F] f32, or [T, S + 1, F].
    Raises ValueError for an expert outside [0, E).
    """
    tokens, slots = selected.shape
    mid = np.empty((tokens, slots + (shared is not None), gate.shape[1]), np.float32)
    _gate_up(runner(simd, threads), x, selected, weight, (gate, gate_kind), (up, up_kind), limit,
             mid[:, :slots])
    if shared is not None:
        gate, up, kind = shared
        _gate_up(runner(simd, threads), x, np.zeros((tokens, 1), np.int32),
                 np.ones((tokens, 1), np.float32), (gate[None], kind), (up[None], kind), limit, mid[:, slots:])
    return mid


def down(mid: np.ndarray, selected: np.ndarray, blocks: np.ndarray, kind: str,
         shared: tuple[np.ndarray, str] | None = None, *, simd: bool = True, threads: int | None = None) -> np.ndarray:
    """y[t] = sum_s W2[selected[t, s]] mid[t, s], plus the shared W2 mid[t, S].

    mid [T, S, F] f32, [T, S + 1, F] with `shared` of [D, row bytes]; selected [T, S] i32; blocks a stack
    [E, D, row bytes] u8. Returns [T, D] f32. Raises ValueError for an expert outside [0, E).
    """
    tokens, slots = selected.shape
    assert mid.shape[:2] == (tokens, slots + (shared is not None)), (mid.shape, selected.shape)
    mid, y = floats(mid), np.zeros((tokens, blocks.shape[1]), np.float32)
    _down(runner(simd, threads), mid[:, :slots], selected, (blocks, kind), y)
    if shared is not None:
        _down(runner(simd, threads), mid[:, slots:], np.zeros((tokens, 1), np.int32),
              (shared[0][None], shared[1]), y)
    return y


def _gate_up(on: "_Runner", x: np.ndarray, selected: np.ndarray, weight: np.ndarray, gate: Weights, up: Weights,
             limit: float, mid: np.ndarray) -> None:
    """Into mid [T, S, F], of which the last axis is contiguous."""
    _check_experts(selected, gate[0])
    assert gate[0].shape[:2] == up[0].shape[:2], (gate[0].shape, up[0].shape)
    library = functions()
    if library is None or x.shape[1] % GROUP:
        return _numpy_gate_up(x, selected, weight, gate, up, limit, mid)
    x, weight, selected = floats(x), floats(weight), np.ascontiguousarray(selected, np.int32)
    gate_stack, up_stack = (_Stack.of(*stack, x.shape[1]) for stack in (gate, up))
    library.ds4mlx_gate_up(on, gate_stack, up_stack, address_of(x), *selected.shape, address_of(selected),
                           address_of(weight), limit, address_of(mid), _token_slots(mid))


def _down(on: "_Runner", mid: np.ndarray, selected: np.ndarray, w: Weights, y: np.ndarray) -> None:
    """Added to y [T, D]."""
    _check_experts(selected, w[0])
    library = functions()
    if library is None or mid.shape[2] % GROUP:
        return _numpy_down(mid, selected, w, y)
    selected = np.ascontiguousarray(selected, np.int32)
    library.ds4mlx_down(on, _Stack.of(*w, mid.shape[2]), address_of(mid), _token_slots(mid), *selected.shape,
                        address_of(selected), address_of(y))


def _token_slots(mid: np.ndarray) -> int:
    return mid.strides[0] // (mid.shape[2] * mid.itemsize)


class _Runner(ctypes.Structure):
    _fields_ = [("simd", ctypes.c_int32), ("threads", ctypes.c_int32)]


def runner(simd: bool = True, threads: int | None = None) -> _Runner:
    """`simd` False takes the plain C++; `threads` None all cores."""
    return _Runner(simd, threads or cores())


class _Stack(ctypes.Structure):
    """Matrices of one shape; `blocks` must outlive it."""
    _fields_ = [("kind", ctypes.c_int32), ("blocks", ctypes.c_void_p), ("matrices", ctypes.c_size_t),
                ("rows", ctypes.c_size_t), ("width", ctypes.c_size_t), ("row_bytes", ctypes.c_size_t)]

    @classmethod
    def of(cls, blocks: np.ndarray, kind: str, width: int) -> "_Stack":
        """Of [matrices, rows, row bytes] u8, rows of `width` weights."""
        block = BLOCK_TYPES[kind]
        assert blocks.dtype == np.uint8 and blocks.flags.c_contiguous, (blocks.dtype, blocks.strides)
        assert width * block.bytes == blocks.shape[2] * block.weights, (kind, blocks.shape, width)
        return cls(block.type_id, address_of(blocks), *blocks.shape[:2], width, blocks.shape[2])


def address_of(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


def floats(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


def _check_experts(selected: np.ndarray, stack: np.ndarray) -> None:
    if selected.size and not 0 <= selected.min() <= selected.max() < len(stack):
        raise ValueError(f"experts {selected.min()} to {selected.max()} are chosen of {len(stack)}")


@cache
def functions() -> ctypes.CDLL | None:
    """The functions of native.cpp, or None. It is no Python module, only built and found like one."""
    spec = find_spec("ds4mlx.ops._native")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        log.warning("products run on NumPy, many times slower: %s does not load: %s", spec.origin, error)
        return None
    if library.ds4mlx_version() != VERSION:
        log.warning("products run on NumPy, many times slower: %s is of another version, install again", spec.origin)
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    on, stack = ctypes.POINTER(_Runner), ctypes.POINTER(_Stack)
    library.ds4mlx_instructions.restype = ctypes.c_char_p
    library.ds4mlx_codebook.argtypes = [address, address]
    library.ds4mlx_matmul.argtypes = [on, stack, size, address, size, size, address, size, size]
    library.ds4mlx_gate_up.argtypes = [on, stack, stack, address, size, size, address, address, ctypes.c_float,
                                       address, size]
    library.ds4mlx_down.argtypes = [on, stack, address, size, size, size, address, address]
    library.ds4mlx_rows.argtypes = [on, address, size, size, address, address, ctypes.c_float, *[address] * 4]
    library.ds4mlx_attend.argtypes = library.ds4mlx_scores.argtypes = [on, address, address]
    library.ds4mlx_compress.argtypes = [on, address, address, address]
    library.ds4mlx_mix_streams.argtypes = [on, *[address] * 6, size]
    library.ds4mlx_enter.argtypes = [on, address, address, size, *[address] * 3, size, *[address] * 3]
    library.ds4mlx_sample.argtypes = [on, address, size, size, *[address] * 6]
    library.ds4mlx_codebook(address_of(IQ2_GRID), address_of(IQ2_SIGNS))
    return library


def _numpy_matmul(x: np.ndarray, stack: np.ndarray, kind: str) -> np.ndarray:
    """As `matmul`, W in its parts [G, N / G, row bytes]."""
    parts, size = stack.shape[:2]
    x, y = x.reshape(len(x), parts, x.shape[-1]), np.empty((len(x), parts * size), np.float32)
    rows = max(1, SLAB_WEIGHTS // x.shape[-1])

    def slab(at: tuple[int, int]) -> None:
        part, start = at
        w = dequantize(stack[part, start:start + rows], kind)
        first = part * size + start
        np.matmul(x[:, part], w.T, out=y[:, first:first + len(w)])

    places = [(part, start) for part in range(parts) for start in range(0, size, rows)]
    for _ in _threads().map(slab, places) if len(places) > 1 else map(slab, places):
        pass  # what a slab raises is raised here
    return y


def _numpy_gate_up(x: np.ndarray, selected: np.ndarray, weight: np.ndarray, gate: Weights, up: Weights, limit: float,
                   mid: np.ndarray) -> None:
    for expert, token, slot in _by_expert(selected):
        g = np.minimum(_numpy_matmul(x[token], gate[0][expert:expert + 1], gate[1]), limit)
        u = np.clip(_numpy_matmul(x[token], up[0][expert:expert + 1], up[1]), -limit, limit)
        with np.errstate(over="ignore"):  # e^-g past float32 makes 0, as it should
            mid[token, slot] = weight[token, slot, None] * (g / (1 + np.exp(-g)) * u)


def _numpy_down(mid: np.ndarray, selected: np.ndarray, w: Weights, y: np.ndarray) -> None:
    for expert, token, slot in _by_expert(selected):
        np.add.at(y, token, _numpy_matmul(mid[token, slot], w[0][expert:expert + 1], w[1]))


def _by_expert(selected: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each chosen expert with the tokens and slots that chose it."""
    for expert in np.unique(selected):
        yield int(expert), *np.nonzero(selected == expert)


@cache
def _threads() -> ThreadPoolExecutor:
    """NumPy lets go of the interpreter while it decodes, so slabs decode on all cores."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="ds4mlx-native")
