"""The compiled searches of `search.cpp`, where a compiler built them: same arguments and results as NumPy's."""
import ctypes
import logging
from functools import cache
from importlib.util import find_spec

import numpy as np

from ds4mlx.gguf.dequant import IQ2_GRID
from ds4mlx.quant import affine, codebook

log = logging.getLogger(__name__)

VERSION = 1     # of the functions in search.cpp


def built() -> bool:
    """Whether `search.cpp` was built with this installation and loads."""
    return _library() is not None


def search_codebook(x: np.ndarray, importance: np.ndarray, *, simd: bool = True) -> codebook.Codes:
    """As `codebook.search`. `simd` False takes narrow vectors; results may differ where two choices are as good."""
    source, n = _Source.of(x, importance), len(x)
    codes = codebook.Codes(np.empty(n, np.float32), np.empty((n, 8), np.uint8), np.empty((n, 8, 4), np.uint8),
                           np.empty((n, 8, 4), np.uint8))
    _library().ds4mlx_search_codebook(source, simd, *map(_at, (codes.d, codes.level, codes.row, codes.sign)))
    return codes


def search_line(x: np.ndarray, importance: np.ndarray, line: affine.Line, *, simd: bool = True) -> affine.Codes:
    """As `affine.search`."""
    source, n = _Source.of(x, importance), len(x)
    codes = affine.Codes(np.empty(n, np.float32), np.empty(n, np.float32), np.empty((n, line.runs), np.uint8),
                         np.empty((n, line.runs), np.uint8), np.empty((n, 256), np.uint8))
    _library().ds4mlx_search_line(source, simd, line.runs,
                                  *map(_at, (codes.d, codes.dmin, codes.scale, codes.least, codes.code)))
    return codes


class _Source(ctypes.Structure):
    """The arrays must outlive it."""
    _fields_ = [("x", ctypes.c_void_p), ("importance", ctypes.c_void_p), ("blocks", ctypes.c_size_t),
                ("period", ctypes.c_size_t)]

    @classmethod
    def of(cls, x: np.ndarray, importance: np.ndarray) -> "_Source":
        for values in (x, importance):
            assert values.dtype == np.float32 and values.flags.c_contiguous and values.shape[1:] == (256,), values.shape
        assert len(x) % len(importance) == 0, (x.shape, importance.shape)
        return cls(_at(x), _at(importance), len(x), len(importance))


class _Tuning(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float * 16) for name in ("factors", "line_shares", "codebook_shares", "offsets")] + [
        (name, ctypes.c_int32) for name in ("factor_count", "line_share_count", "codebook_share_count", "offset_count",
                                            "rounds")]

    @classmethod
    def from_python(cls) -> "_Tuning":
        lists = (codebook.FACTORS, affine.SHARES, codebook.SHARES, affine.OFFSETS)
        assert affine.ROUNDS == codebook.ROUNDS
        return cls(*((ctypes.c_float * 16)(*values) for values in lists), *map(len, lists), codebook.ROUNDS)


def _at(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


@cache
def _library() -> ctypes.CDLL | None:
    """The functions of search.cpp, or None. It is no Python module, only built and found like one."""
    spec = find_spec("ds4mlx.quant._search")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        log.warning("NumPy searches, a hundred times slower: %s does not load: %s", spec.origin, error)
        return None
    if library.ds4mlx_search_version() != VERSION:
        log.warning("NumPy searches, a hundred times slower: %s is of another version, install again", spec.origin)
        return None
    address, source = ctypes.c_void_p, ctypes.POINTER(_Source)
    library.ds4mlx_search_prepare.argtypes = [address, ctypes.POINTER(_Tuning)]
    library.ds4mlx_search_codebook.argtypes = [source, ctypes.c_int32, *[address] * 4]
    library.ds4mlx_search_line.argtypes = [source, ctypes.c_int32, ctypes.c_int32, *[address] * 5]
    library.ds4mlx_search_prepare(_at(np.ascontiguousarray(IQ2_GRID)), _Tuning.from_python())
    return library
