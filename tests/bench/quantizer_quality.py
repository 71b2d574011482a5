"""Errors and speed of our encoders beside llama.cpp's, on the same matrices with the same importance.

    python tests/bench/quantizer_quality.py /path/to/libggml-base.so

The library is llama.cpp's, from a build or from a package of it; nothing of it is used elsewhere. Errors are ratios,
ours over theirs: below 1 is better. Speed is of one core's processor time.
"""
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ds4mlx.gguf.blocks import BLOCK_TYPES, row_bytes
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.quant.encode import SEARCHED, encode

ROWS, WIDTH = 64, 2048


def matrices() -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """(distribution, importance, x [ROWS, WIDTH], importance [WIDTH])."""
    rng = np.random.default_rng(0)
    flat, spread = np.ones(WIDTH, np.float32), np.exp(rng.standard_normal(WIDTH)).astype(np.float32)
    drawn = {"Gaussian": rng.standard_normal((ROWS, WIDTH)), "Laplace": rng.laplace(size=(ROWS, WIDTH)),
             "Student t, 3": rng.standard_t(3, (ROWS, WIDTH))}
    for name, x in drawn.items():
        for label, column in (("equal", flat), ("log-normal", spread)):
            yield name, label, (0.02 * x).astype(np.float32), column


def theirs(library: ctypes.CDLL, x: np.ndarray, kind: str, column: np.ndarray) -> np.ndarray:
    blocks, type_id = np.zeros((len(x), row_bytes(kind, x.shape[1])), np.uint8), BLOCK_TYPES[kind].type_id
    library.ggml_quantize_init(type_id)
    library.ggml_quantize_chunk(type_id, x.ctypes.data_as(ctypes.c_void_p), blocks.ctypes.data_as(ctypes.c_void_p),
                                ctypes.c_int64(0), ctypes.c_int64(len(x)), ctypes.c_int64(x.shape[1]),
                                column.ctypes.data_as(ctypes.c_void_p))
    return blocks


def errors(x: np.ndarray, blocks: np.ndarray, kind: str, column: np.ndarray) -> np.ndarray:
    """Plain and weighted."""
    square = (dequantize(blocks, kind) - x).astype(np.float64) ** 2
    return np.array([square.mean(), (square * column).mean()])


def rate(x: np.ndarray, work: Callable[[], np.ndarray]) -> float:
    """Millions of weights a second."""
    spent = []
    for _ in range(3):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return x.size / min(spent) / 1e6


def main(path: Path) -> None:
    library = ctypes.CDLL(str(path))
    print(f"{'':8} {'weights':13} {'importance':11} {'error':>8} {'weighted':>8}")
    for kind in SEARCHED:
        for name, label, x, column in matrices():
            ratio = errors(x, encode(x, kind, column), kind, column) / errors(x, theirs(library, x, kind, column), kind,
                                                                             column)
            print(f"{kind:8} {name:13} {label:11} {ratio[0]:8.3f} {ratio[1]:8.3f}")
    _, _, x, column = next(matrices())
    same = np.array_equal(encode(x, "Q8_0"), theirs(library, x, "Q8_0", column))
    print(f"Q8_0 {'the same bytes' if same else 'OTHER BYTES'}")
    for kind in SEARCHED:
        print(f"{kind:8} {rate(x, lambda: encode(x, kind, column, threads=1)):6.1f} M weights a second and core, "
              f"llama.cpp {rate(x, lambda: theirs(library, x, kind, column)):.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
