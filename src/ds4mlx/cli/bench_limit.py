"""The most tokens per second that a machine's memory allows: its bandwidth over the bytes that a token must read."""
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COPY_FLOATS = 1 << 26   # 256 MiB, beyond any cache, and little beside a model
COPIES = 5


@dataclass(frozen=True, slots=True)
class Limit:
    """tps: of one session, at each frontier in order."""
    gb_s: float
    source: str
    tps: tuple[float, ...]


def limit(path: Path, frontiers: Sequence[int], gb_s: float | None, engine: str) -> Limit | None:
    """For the model file at `path`; None where nothing is known of the memory. Needs MLX, for what a token reads."""
    try:
        from ds4mlx.engine import mlx_plan
    except ImportError:
        return None
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.models.registry import family_of
    known = (gb_s, "as given") if gb_s is not None else _bandwidth(engine)
    if known is None:
        return None
    with GGUF.open(path) as file:
        config = family_of(file.metadata).role("names").validate(file)
        kinds = mlx_plan.file_kinds(file, config)
        read = [mlx_plan.weight_bytes(config, kinds, n) + mlx_plan.cache_bytes(config, n) for n in frontiers]
    return Limit(*known, tuple(known[0] * 1e9 / count for count in read))


def _bandwidth(engine: str) -> tuple[float, str] | None:
    """GB/s of the memory that the weights are in."""
    if engine != "mlx":
        return None     # what a card's memory does is not MLX's to say
    from ds4mlx.engine.mlx_kernels import copy_gb_s, machine
    here = machine("metal-emulated")    # which does not measure
    if here.published_gb_s is not None:
        return float(here.published_gb_s), f"published for {here.device}"
    return max(copy_gb_s(COPY_FLOATS), copied_gb_s()), "measured by a copy"     # of the device; of the CPU


def copied_gb_s() -> float:
    """GB/s of the best of some copies of an array on the CPU, its bytes counted twice."""
    import numpy as np
    source = np.ones(COPY_FLOATS, np.float32)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best / 1e9
