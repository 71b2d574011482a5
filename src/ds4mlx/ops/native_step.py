"""A step's small operations for the CPU, by `native.cpp`: on rows of the cache, on streams and on logits.

As graphs of MLX's operations they take 10 to 40 times as long, for each of those costs some 5 microseconds whatever its
size. For shapes that native.cpp does not take, or where it is not built, callers keep to the reference.
"""
import ctypes
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ds4mlx.ops import native
from ds4mlx.ops.kv_round import FP4_BLOCK, FP8_BLOCK, Packing, pack_bytes
from ds4mlx.ops.native import address_of
from ds4mlx.ops.paged import Paged

LANES = 8           # floats that native.cpp takes at a time
MOST_HEADS = 128    # whose queries it holds for scores
MOST_STREAMS = 8    # of a token
PACKINGS = {None: 0, "fp8": 1, "fp4": 2}


class Rows(NamedTuple):
    """Channels of a row, how many of them are rotary, and how they are held."""
    width: int
    tail: int
    packing: Packing | None

    @property
    def bytes(self) -> int:
        return pack_bytes(self.width, self.tail, self.packing) if self.packing else 4 * self.width

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.packing else np.float32)

    @property
    def shape(self) -> tuple[int]:
        return (self.bytes // self.dtype.itemsize,)

    def fits(self) -> bool:
        """Whether native.cpp is there and takes them."""
        block = {None: LANES, "fp8": FP8_BLOCK, "fp4": FP4_BLOCK}[self.packing]
        plain = self.width - self.tail if self.packing == "fp8" else self.width
        whole = self.packing != "fp4" or not self.width & (self.width - 1)
        return native.built() and plain > 0 and plain % block == 0 and self.tail % LANES == 0 and whole


def make_rows(x: mx.array, form: Rows, norm: mx.array | None, eps: float, cos: mx.array, sin: mx.array,
              into: np.ndarray | None = None, at: np.ndarray | None = None) -> np.ndarray:
    """Rows of vectors x [n, width]: over their rms times norm, if that is given, rotated by cos, sin [tables, tail/2],
    whose rows serve n / tables vectors each, and packed. Returns [n, row], or `into` with vector i at row at[i]."""
    x, cos, sin = map(_floats, (x, cos, sin))
    count, weights = len(x), None if norm is None else _floats(norm)
    rows = np.empty((count, *form.shape), form.dtype) if into is None else into
    at = np.arange(count, dtype=np.int64) if at is None else np.ascontiguousarray(at, np.int64)
    native.functions().ds4mlx_rows(
        native.runner(), ctypes.byref(_form(form)), count, count // max(len(cos), 1), address_of(x),
        None if weights is None else address_of(weights), eps, *map(address_of, (cos, sin, at, rows)))
    return rows


def attend(q: mx.array, cos: mx.array, sin: mx.array, windows: mx.array, positions: mx.array, rows: Paged | None,
           most: int, chosen: mx.array | None, ratio: int, sink: mx.array, eps: float) -> mx.array:
    """`attention_step`; its shapes are checked, and its rows fit."""
    B, width, H = *windows.shape[:2], sink.shape[0]
    form = row_form(windows, q.shape[1] // H, 2 * cos.shape[1])
    kept = [_floats(a) for a in (q, cos, sin, sink)]
    held, at = _host(windows), _integers(positions)
    paged, pool = _paged(rows)
    picks = None if chosen is None else _integers(chosen)
    o = np.empty(kept[0].shape, np.float32)
    call = _Attend(_form(form), paged, address_of(held), *map(address_of, (*kept, at)),
                   None if picks is None else address_of(picks), B, H, width, most,
                   0 if picks is None else picks.shape[1], ratio if rows else 0, eps)
    native.functions().ds4mlx_attend(native.runner(), ctypes.byref(call), address_of(o))
    return mx.array(o)


def scores(q: mx.array, weight: mx.array, rows: Paged, most: int, scale: float, form: Rows) -> mx.array:
    """`index_scores_step`; its shapes are checked, and its rows fit."""
    B, H = weight.shape
    held, by = _host(q), _floats(weight)
    paged, pool = _paged(rows)
    found = np.empty((B, most), np.float32)
    call = _Scores(_form(form), paged, address_of(held), address_of(by), B, H, most, scale)
    native.functions().ds4mlx_scores(native.runner(), ctypes.byref(call), address_of(found))
    return mx.array(found)


def compress(k: mx.array, s: mx.array, frontiers: mx.array, ape: mx.array, norm: mx.array, cos: mx.array, sin: mx.array,
             positions: mx.array, form: Rows, eps: float) -> tuple[mx.array, mx.array]:
    """`compress_token`; its shapes are checked, and its rows fit."""
    kept = [_floats(a) for a in (k, s, ape, norm, cos, sin)]
    at, after = _integers(positions), np.array(native.array(frontiers))     # a copy
    rows = np.zeros((k.shape[0], *form.shape), form.dtype)
    call = _Compress(_form(form), *map(address_of, kept), address_of(at), k.shape[0], ape.shape[0],
                     k.shape[1] // form.width, eps)
    native.functions().ds4mlx_compress(native.runner(), ctypes.byref(call), address_of(after), address_of(rows))
    return mx.array(after), mx.array(rows)


def row_form(rows: mx.array, width: int, tail: int) -> Rows:
    """Of attention rows of `width` channels."""
    return Rows(width, tail, "fp8" if rows.dtype == mx.uint8 else None)


def takes_streams(streams: mx.array) -> bool:
    return native.built() and streams.shape[1] <= MOST_STREAMS and streams.shape[2] % LANES == 0


def mix_streams(streams: mx.array, update: tuple[mx.array, mx.array, mx.array] | None,
                products: int) -> tuple[np.ndarray, np.ndarray]:
    """The streams of `hyper_mix` [T, N, D], and its sums [T, products + 1], of which the products are not set."""
    x = native.floats(native.array(streams))
    kept = [_floats(a) for a in update or ()]
    after, sums = np.empty_like(x) if kept else x, np.empty((len(x), products + 1), np.float32)
    pointers = map(address_of, (*kept, after)) if kept else (None,) * 4
    native.functions().ds4mlx_mix_streams(native.runner(), ctypes.byref(_hyper(x, 0.0, 0.0)), *pointers,
                                          address_of(sums) + 4 * products, products + 1)
    return after, sums


def enter(streams: mx.array, sums: mx.array, scale: mx.array, base: mx.array, norm: mx.array, iterations: int,
          hc_eps: float, norm_eps: float, leave: bool = False) -> tuple[mx.array, mx.array, mx.array]:
    """`hyper_enter`; with `leave` the x of `hyper_leave`, and nothing else is set."""
    x, *kept = (_floats(a) for a in (streams, sums, scale, base, norm))
    T, N, D = x.shape
    out, post, m = (np.empty(shape, np.float32) for shape in ((T, D), (T, N), (T, N, N)))
    back = (None, None) if leave else (address_of(post), address_of(m))
    native.functions().ds4mlx_enter(native.runner(), ctypes.byref(_hyper(x, hc_eps, norm_eps)),
                                    address_of(kept[0]), sums.shape[1], *map(address_of, kept[1:]),
                                    iterations, address_of(out), *back)
    return mx.array(out), mx.array(post), mx.array(m)


def sample(logits: mx.array, uniform: mx.array, temperature: mx.array, top_k: mx.array, min_p: mx.array,
           top_p: mx.array) -> mx.array:
    """`sample`."""
    x, u, t, m, p = (_floats(a) for a in (logits, uniform, temperature, min_p, top_p))
    k, tokens = _integers(top_k), np.empty(len(x), np.int32)
    native.functions().ds4mlx_sample(native.runner(), address_of(x), *x.shape,
                                     *map(address_of, (u, t, k, m, p, tokens)))
    return mx.array(tokens)


class _Form(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("packing", "width", "tail", "bytes")]


class _Paged(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_void_p), ("pages", ctypes.c_void_p), ("held", ctypes.c_size_t),
                ("page_rows", ctypes.c_size_t)]


class _Attend(ctypes.Structure):
    _fields_ = [("form", _Form), ("rows", _Paged),
                *((name, ctypes.c_void_p) for name in ("windows", "q", "cos", "sin", "sink", "positions", "chosen")),
                *((name, ctypes.c_size_t) for name in ("sequences", "heads", "window", "most", "picks", "ratio")),
                ("eps", ctypes.c_float)]


class _Scores(ctypes.Structure):
    _fields_ = [("form", _Form), ("rows", _Paged), ("q", ctypes.c_void_p), ("weight", ctypes.c_void_p),
                *((name, ctypes.c_size_t) for name in ("sequences", "heads", "most")), ("scale", ctypes.c_float)]


class _Compress(ctypes.Structure):
    _fields_ = [("form", _Form),
                *((name, ctypes.c_void_p) for name in ("k", "s", "ape", "norm", "cos", "sin", "positions")),
                *((name, ctypes.c_size_t) for name in ("sequences", "ratio", "overlap")), ("eps", ctypes.c_float)]


class _Hyper(ctypes.Structure):
    _fields_ = [("streams", ctypes.c_void_p), *((name, ctypes.c_size_t) for name in ("tokens", "N", "D")),
                ("hc_eps", ctypes.c_float), ("norm_eps", ctypes.c_float)]


def _hyper(streams: np.ndarray, hc_eps: float, norm_eps: float) -> _Hyper:
    return _Hyper(address_of(streams), *streams.shape, hc_eps, norm_eps)


def _form(rows: Rows) -> _Form:
    return _Form(PACKINGS[rows.packing], rows.width, rows.tail, rows.bytes)


def _paged(rows: Paged | None) -> tuple[_Paged, list[np.ndarray]]:
    """And the arrays that must outlive it."""
    if rows is None:
        return _Paged(None, None, 0, 1), []
    kept = [_host(rows.rows), _integers(rows.pages)]
    return _Paged(*map(address_of, kept), kept[1].shape[1], rows.page_rows), kept


def _floats(a: mx.array) -> np.ndarray:
    return native.floats(native.array(a))


def _host(a: mx.array) -> np.ndarray:
    """Rows as they are, without a copy where they lie one after another."""
    mx.eval(a)
    return np.ascontiguousarray(np.array(a, copy=False))


def _integers(a: mx.array) -> np.ndarray:
    mx.eval(a)
    return np.ascontiguousarray(np.array(a, copy=False), np.int32)
