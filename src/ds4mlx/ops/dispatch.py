"""Which implementation of an op runs: the one place that decides.

An op calls `pick(reference, metal=…, cuda=…, native=…)(args)`. The reference is plain MLX, runs anywhere and is the
definition; the others are optional. Models never ask where they are.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import mlx.core as mx

Op = TypeVar("Op", bound=Callable[..., object])
Name = Literal["auto", "reference", "cpu", "metal", "metal-emulated", "cuda"]

_chosen: Name = "auto"
_exact = False


def device() -> str:
    """The backend that kernels are written for here: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def pick(reference: Op, *, metal: Op | None = None, cuda: Op | None = None, native: Op | None = None) -> Op:
    """The implementation for this device, or the one that `use` or `only` asks for; the reference where there is none.

    `native` is for the CPU, where MLX's own product is far slower than the BLAS that NumPy brings.
    """
    name = device() if _chosen == "auto" else _chosen
    implementations = {"metal": metal, "metal-emulated": metal, "cuda": cuda, "cpu": native}
    return implementations.get(name) or reference


def use(name: Name, exact: bool = False) -> None:
    """From here on every op uses implementation `name` where it has it; "auto" is this device's. `exact`: no path that
    rounds what the reference does not (half tiles in prefill, mainly)."""
    global _chosen, _exact
    _chosen, _exact = name, exact


@contextmanager
def only(name: Name, exact: bool = False) -> Iterator[None]:
    """`use`, within the block."""
    before = _chosen, _exact
    use(name, exact)
    try:
        yield
    finally:
        use(*before)


def emulated() -> bool:
    """Whether Metal kernels run in the emulator, on the CPU."""
    return _chosen == "metal-emulated"


def exact() -> bool:
    """Whether paths that round more than the reference are to be avoided (--quality)."""
    return _exact
