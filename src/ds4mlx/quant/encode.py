"""Weights into the blocks of any GGUF type, with regard to how much each input column matters."""
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ds4mlx.gguf import writer
from ds4mlx.gguf.blocks import BLOCK_TYPES, row_bytes
from ds4mlx.quant import affine, codebook, compiled

LINES = {line.kind: line for line in (affine.Q2_K, affine.Q4_K)}
SEARCHED = ("IQ2_XXS", *LINES)      # kinds that importance has a say in
SHRINKAGE = 0.1             # see `smoothed`
LARGEST = 65504             # half precision
SLAB_WEIGHTS = 1 << 15      # searched at once on a core by NumPy, which takes 1 KiB for each weight of IQ2_XXS
COMPILED_SLAB_WEIGHTS = 1 << 19


def encode(values: np.ndarray, kind: str, importance: np.ndarray | None = None, *, threads: int | None = None,
           compiled_too: bool = True) -> np.ndarray:
    """values [..., width] -> blocks u8 [..., row bytes] of the GGUF type `kind`.

    importance [width], at least 0, says how much an error of a column counts: sum importance (x - w)^2 is made small
    for the kinds of SEARCHED; others are rounded to nearest. `threads` None: all processors. Without `compiled_too`
    NumPy searches even where search.cpp is there. Raises ValueError for an unknown kind, a width of partial blocks,
    importance of another shape or below 0, and weights that are not finite or too large.
    """
    if kind not in SEARCHED:
        return writer.quantize(values, kind)
    width = values.shape[-1]
    nbytes, weights = row_bytes(kind, width), BLOCK_TYPES[kind].weights
    values = np.asarray(values, np.float32)
    largest = float(np.abs(values).max(initial=0))
    if not largest <= LARGEST:  # false for what is not a number as well
        raise ValueError(f"{kind} needs finite weights of at most {LARGEST}, got {largest:g}")
    x = np.ascontiguousarray(values).reshape(-1, width // weights, weights)
    w = smoothed(importance, width).reshape(-1, weights)
    fast = compiled_too and compiled.built()
    rows = max(1, (COMPILED_SLAB_WEIGHTS if fast else SLAB_WEIGHTS) // width)

    def slab(start: int) -> np.ndarray:
        return _blocks(x[start:start + rows].reshape(-1, weights), w, kind, fast)

    with ThreadPoolExecutor(threads or processors()) as pool:  # NumPy and search.cpp let go of the interpreter
        blocks = list(pool.map(slab, range(0, len(x), rows)))
    blocks = np.concatenate(blocks) if blocks else np.empty((0, BLOCK_TYPES[kind].bytes), np.uint8)
    return blocks.reshape(*values.shape[:-1], nbytes)


def _blocks(x: np.ndarray, w: np.ndarray, kind: str, fast: bool) -> np.ndarray:
    """x f32 [n, 256]; w f32 [m, 256], which repeats after m blocks. Returns u8 [n, block bytes]."""
    if kind == "IQ2_XXS":
        return codebook.pack((compiled.search_codebook if fast else codebook.search)(x, w))
    line = LINES[kind]
    return affine.pack((compiled.search_line if fast else affine.search)(x, w, line), line)


def smoothed(importance: np.ndarray | None, width: int) -> np.ndarray:
    """f32 [width], all above 0, mean 1.1: importance over its mean, and a tenth for every column.

    Importance is an estimate from few tokens. The tenth costs 1 % of the weighted error where importance is spread
    log-normally with deviation 1, and takes 10 % off the plain one; it also keeps columns that no token has met.
    """
    if importance is None:
        return np.full(width, 1 + SHRINKAGE, np.float32)
    if importance.shape != (width,) or not np.isfinite(importance).all() or (importance < 0).any():
        raise ValueError(f"importance is {importance.shape} from {importance.min():g}, need ({width},) numbers of at "
                         "least 0")
    mean = importance.mean(dtype=np.float64)
    if mean == 0:
        return smoothed(None, width)
    return (importance / mean + SHRINKAGE).astype(np.float32)


def processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
