"""Which implementation of an op runs: the one place that decides.

An op calls `pick(reference, metal=…, cuda=…, native=…)(args)`. The reference is plain MLX, runs anywhere and is the
definition; the others are optional. Models never ask where they are.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import TypeVar

import mlx.core as mx

Op = TypeVar("Op", bound=Callable[..., object])

_forced: str | None = None


def device() -> str:
    """The backend that kernels are written for here: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def pick(reference: Op, *, metal: Op | None = None, cuda: Op | None = None, native: Op | None = None) -> Op:
    """The implementation for this device, or the one that `only` asks for; the reference where there is none.

    `native` is for the CPU, where MLX's own product is far slower than the BLAS that NumPy brings.
    """
    implementations = {"metal": metal, "cuda": cuda, "cpu": native}
    return implementations.get(_forced or device()) or reference


@contextmanager
def only(name: str) -> Iterator[None]:
    """Within the block every op uses implementation `name` ("reference", "metal", "cuda", "cpu") where it has it."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@cache
def metal_source(stem: str) -> str:
    """The text of metal_kernels/STEM.metal, the same in a wheel and a checkout."""
    return files("ds4mlx.metal_kernels").joinpath(f"{stem}.metal").read_text(encoding="ascii")
