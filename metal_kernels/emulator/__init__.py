"""Runs mx.fast.metal_kernel sources on a CPU: the same text, compiled by clang and executed one fiber per thread.

    kernel = metal_kernel("axpy", ["x", "a"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i] * a;")
    y, = kernel(inputs=[x, 2.0], grid=(n, 1, 1), threadgroup=(256, 1, 1), output_shapes=[x.shape],
                output_dtypes=[x.dtype])

Buffers end at guard pages, undefined memory is NaN, barriers and SIMD-group operations must be reached by every live
thread of their group, pointers of the wrong address space do not compile. `checking` adds a search for races and for
undefined behaviour, `counting` counts the bytes that a launch moves.

A pass does not prove that Apple's compiler accepts the text, for the checks of its dialect are lexical and clang is a
near relative, nor does it say anything of speed, registers or bank conflicts. Sums are taken in another order than a
GPU's, and functions are as exact as the C library's. SIMD-group operations in a branch that only some lanes take are
refused, though Metal defines them. Not guarded: the last bytes up to a multiple of 16 of a buffer (counted launches do
see those), and reads just before its start. Not provided: textures, function constants, complex64, vectors of bool,
packed vectors of 3.
"""
from ds4mlx.metal_kernels.emulator.errors import (
    CompileError, DivergenceError, EmulatorError, EndlessLoopError, LimitError, NoCompilerError, OutOfBoundsError,
    RaceError, StrictError, UndefinedBehaviourError)
from ds4mlx.metal_kernels.emulator.kernel import checking, metal_kernel
from ds4mlx.metal_kernels.emulator.traffic import BufferTraffic, Moved, Traffic, counting

__all__ = ["BufferTraffic", "CompileError", "DivergenceError", "EmulatorError", "EndlessLoopError", "LimitError",
           "Moved", "NoCompilerError", "OutOfBoundsError", "RaceError", "StrictError", "Traffic",
           "UndefinedBehaviourError", "checking", "counting", "metal_kernel"]
