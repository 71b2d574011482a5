"""How fast quantised weights are multiplied on this CPU: native.cpp in vectors and in plain C++, and NumPy's way.

    python tests/bench/cpu_matmul.py [--kinds IQ2_XXS ...] [--tokens 1 4 175] [--rows 2048] [--width 4096] [--rounds 9]

Prints G weights a second, of the best of the rounds, all ways in every round: times the number of tokens, that is
multiply-adds. "core" divides by processor time, which other work on the machine changes least: the rate of one core.
"wall" divides by the time that passes, on all cores. "gain" is NumPy's processor time over that of the vectors.
"""
import argparse
import os
import time
from collections.abc import Callable, Iterator
from unittest import mock

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its idle threads spin, at everyone's cost; slabs have threads of their own
import numpy as np

from ds4mlx.gguf.blocks import BLOCK_TYPES, row_bytes
from ds4mlx.ops import native

KINDS = ("IQ2_XXS", "Q2_K", "Q4_K", "Q8_0", "MXFP4", "F16")
SCALES = {"Q8_0": [1], "Q2_K": [81, 83], "Q4_K": [1, 3], "IQ2_XXS": [1]}  # high bytes of half-precision scales


def weights(rng: np.random.Generator, kind: str, rows: int, width: int) -> np.ndarray:
    """Random blocks of ordinary scales: subnormal numbers would be slow, and are not what models hold."""
    if kind == "F16":
        return rng.normal(size=(rows, width)).astype(np.float16).view(np.uint8)
    raw = rng.integers(0, 256, (rows, row_bytes(kind, width)), np.uint8)
    blocks = raw.reshape(-1, BLOCK_TYPES[kind].bytes)
    for at in SCALES.get(kind, []):
        blocks[:, at] = 0x20 + blocks[:, at] % 8
    if kind == "MXFP4":
        blocks[:, 0] = 120 + blocks[:, 0] % 8
    return raw


def ways(x: np.ndarray, raw: np.ndarray, kind: str) -> Iterator[tuple[str, Callable[[], object]]]:
    def numpy() -> None:
        with mock.patch.object(native, "functions", lambda: None):
            native.matmul(x, raw, kind)
    if native.built():
        yield "vectors", lambda: native.matmul(x, raw, kind, threads=1)
        yield "all threads", lambda: native.matmul(x, raw, kind)
        yield "plain C++", lambda: native.matmul(x, raw, kind, simd=False, threads=1)
    yield "NumPy", numpy


def best_times(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Least processor time and least passing time of each, in seconds."""
    best = dict.fromkeys(calls, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, call in calls.items():
            cpu, wall = time.process_time(), time.perf_counter()
            call()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            best[name] = min(best[name][0], cpu), min(best[name][1], wall)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 175])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rng, work = np.random.default_rng(0), args.rows * args.width / 1e9
    print(f"{native.describe()}; W of {args.rows} x {args.width}\n"
          "kind   tokens  vectors: core   all threads: wall   plain C++: core   NumPy: core  wall   gain")
    for kind in args.kinds:
        raw = weights(rng, kind, args.rows, args.width)
        for tokens in args.tokens:
            x = rng.normal(size=(tokens, args.width)).astype(np.float32)
            times = best_times(dict(ways(x, raw, kind)), args.rounds)
            core = {name: work / cpu for name, (cpu, _) in times.items()}
            wall = {name: work / passed for name, (_, passed) in times.items()}
            fast, plain, numpy = (core.get(name, float("nan")) for name in ("vectors", "plain C++", "NumPy"))
            print(f"{kind:8}{tokens:5}{fast:15.2f}{wall.get('all threads', float('nan')):20.2f}{plain:18.2f}"
                  f"{numpy:14.2f}{wall['NumPy']:6.2f}{fast / numpy:7.1f}", flush=True)


if __name__ == "__main__":
    main()
