"""Runs mx.fast.metal_kernel sources on a CPU: the same text, compiled by clang and executed one fiber per thread."""
from ds4mlx.metal_kernels.emulator.errors import (
    CompileError, DivergenceError, EmulatorError, EndlessLoopError, LimitError, OutOfBoundsError, RaceError, StrictError,
    UndefinedBehaviourError)
from ds4mlx.metal_kernels.emulator.kernel import checking, metal_kernel

__all__ = ["CompileError", "DivergenceError", "EmulatorError", "EndlessLoopError", "LimitError", "OutOfBoundsError",
           "RaceError", "StrictError", "UndefinedBehaviourError", "checking",
           "metal_kernel"]
