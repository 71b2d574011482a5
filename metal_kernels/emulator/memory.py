"""Buffers that end at an inaccessible page, so that a kernel's access past the end is a fault.

A buffer is rounded up to 16 bytes, as vector types are aligned. The bytes around it are a canary.
"""
from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ds4mlx.metal_kernels.emulator.errors import EmulatorError, OutOfBoundsError

PAGE = 4096
CANARY = 0xA5


@dataclass(frozen=True, slots=True)
class Guarded:
    """One such buffer; `bytes` is its content."""
    name: str
    address: int
    bytes: np.ndarray
    around: tuple[np.ndarray, ...]

    def check(self) -> None:
        """Raises OutOfBoundsError when the canary was overwritten."""
        if any((part != CANARY).any() for part in self.around):
            raise OutOfBoundsError(f"out-of-bounds write next to buffer '{self.name}' ({self.bytes.size} bytes)")


@contextmanager
def guarded(library: ctypes.CDLL, name: str, nbytes: int) -> Iterator[Guarded]:
    """A buffer for the block; nothing of it may be used afterwards."""
    base, span = ctypes.c_void_p(), ctypes.c_size_t()
    address = library.msl_alloc(nbytes, ctypes.byref(base), ctypes.byref(span))
    if not address:
        raise EmulatorError(f"no memory for the {nbytes} bytes of buffer '{name}'; run smaller shapes")
    start, end = base.value + PAGE, base.value + span.value - PAGE
    around = tuple(_at(at, size) for at, size in ((start, address - start), (address + nbytes, end - address - nbytes))
                   if size)
    for part in around:
        part[:] = CANARY
    try:
        yield Guarded(name, address, _at(address, nbytes), around)
    finally:
        library.msl_free(base, span)


def _at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_ubyte * max(size, 1)).from_address(address))[:size]
