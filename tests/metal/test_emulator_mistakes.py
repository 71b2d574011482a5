"""Mistakes that a GPU answers with garbage or a hang, and texts that only Apple's compiler would refuse."""
import numpy as np
import pytest

from ds4mlx.metal_kernels.emulator import (
    CompileError, DivergenceError, EndlessLoopError, LimitError, OutOfBoundsError, StrictError,
    UndefinedBehaviourError, checking, metal_kernel)
from ds4mlx.metal_kernels.emulator.toolchain import compiler

SUM = "inline float first(const device float* p) { return p[0]; }"


@pytest.mark.parametrize("body, says", [
    ("if (i < 40) { threadgroup_barrier(mem_flags::mem_threadgroup); }\ny[i] = x[i];", "line 2.*already returned"),
    ("if (i > 60) { return; }\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = x[i];", "line 3.*already returned"),
    ("float v = x[i];\nif (i < 7) { v = simd_sum(v); }\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = v;",
     "7 thread.*SIMD-group operation on line 3"),
    ("float v = x[i];\nif (i % 2) { v = simd_sum(v);\n} else { v = simd_sum(v); }\ny[i] = v;", "line 4.*line 3"),
    ("if (i == 3) { return; }\ny[i] = simd_shuffle(x[i], 3);", "inactive SIMD lane 3 on line 3"),
], ids=["barrier in a branch", "barrier after a return", "sum in a branch", "two sums", "shuffle from a returned lane"])
def test_threads_of_a_group_that_part_ways_are_an_error(emulate, body, says):
    with pytest.raises(DivergenceError, match=says):
        emulate(body)


@pytest.mark.parametrize("body, says", [
    ("y[i] = x[i];\ny[i + 4] = 0;", r"buffer 'y' \(256 bytes\), byte offset 256 .*small\.source:3"),
    ("y[i] = x[i + 16];", r"buffer 'x' \(256 bytes\), byte offset 256 .*small\.source:2"),
    ("y[int(i) - 1] = x[i];", "write next to buffer 'y'"),
    ("y[i + 1000000000000ul] = x[i];", r"outside every buffer .*small\.source:2"),
    ("threadgroup float t[64];\nthreadgroup float* p = t;\np[i + 1] = x[i];\ny[i] = p[0];",
     r"threadgroup variable #0 \(256 bytes\), byte offset 256 .*small\.source:4"),
], ids=["write past the end", "read past the end", "write before the start", "far away", "threadgroup memory"])
def test_an_access_out_of_bounds_is_an_error(emulate, body, says):
    with pytest.raises(OutOfBoundsError, match=says):
        emulate(body)


@pytest.mark.parametrize("body, error, says", [
    ("float a[4] = {0, 1, 2, 3};\ny[i] = a[i];", OutOfBoundsError, r"array index out of bounds .*source:3"),
    ("y[i] = *(const device float*)((const device uchar*)x + i);", UndefinedBehaviourError, "misaligned"),
    ("y[i] = 1 << (i + uint(x[i]));", UndefinedBehaviourError, "shift count out of range"),
    ("y[i] = 7 / int(x[i] - 1.0f);", UndefinedBehaviourError, "division by zero"),
    ("y[i] = int(x[i] * 1e20f);", UndefinedBehaviourError, "out of the integer's range"),
], ids=["array index", "alignment", "shift", "division", "conversion"])
def test_a_debug_build_finds_undefined_behaviour(emulate, body, error, says):
    with checking(debug=True), pytest.raises(error, match=says):
        emulate(body)


def test_a_loop_without_end_is_an_error(emulate):
    with pytest.raises(EndlessLoopError, match=r"no end after 1 s .*small\.source:2"):
        emulate("while (x[0] == 1.0f) { y[i] += 1.0f; }", timeout_s=1)


def test_memory_that_nobody_wrote_is_nan(emulate):
    assert np.isnan(emulate("threadgroup float t[64];\ny[i] = t[i];")).all()
    assert np.isnan(emulate("if (i > 64) { y[i] = 0; }")).all()


@pytest.mark.parametrize("body, header, says", [
    ("y[i] = f(x);", "inline float f(const float* p) { return p[0]; }", r"header:1: pointer .* has no address space"),
    ("threadgroup float t[4];\ny[i] = first(t);", SUM, "source:3:.*no matching function"),
    ("y[i] = tab[i % 2];", "float tab[2] = {1.0f, 2.0f};\n", "header:1: a program-scope variable"),
    ("y[i] = 0;", "inline void f() {\n threadgroup float t[4]; }\n", "header:2: threadgroup variables belong"),
    ("static float a = 0;\ny[i] = a;", "", "source:2: a static variable"),
    ("double d = x[i];\ny[i] = float(d);", "", "source:2: no double"),
    ("y[i] = std::abs(x[i]);", "", "source:2: no std::"),
    ("auto f = [&](float v) { return v; };\ny[i] = f(x[i]);", "", "source:2: no lambdas"),
    ("y[i] = x[i];", "inline float hypot(float a, float b) { return a + b; }", "header:1: MLX already defines 'hypot'"),
    ("y[i] = x[i]; // \N{MICRO SIGN}", "", "source: not ASCII"),
    ("y[i] = two();", "inline float two() { return 2.0f; } // two", "header: the last line needs its newline"),
], ids=["no space", "wrong space", "global", "helper's threadgroup memory", "static", "double", "std", "lambda",
        "MLX's name", "not ASCII", "no newline"])
def test_what_apples_compiler_would_refuse_is_refused(emulate, body, header, says):
    with pytest.raises(StrictError, match=says):
        emulate(body, header=header)


def test_a_cast_between_address_spaces_is_refused(emulate):
    if not compiler().is_clang:
        pytest.skip("ziglang gives no syntax tree to find casts in")
    with pytest.raises(StrictError, match=r"source:2: cast to 'threadgroup float \*' from another address space"):
        emulate("threadgroup float* p = (threadgroup float*)y;\np[i] = x[i];")


def test_a_small_input_lands_in_constant_memory_as_in_mlx(emulate):
    with pytest.raises(StrictError, match="source:2:.*no matching function"):
        emulate("y[i] = first(x);", header=SUM, x=np.ones(4, np.float32))
    assert emulate("y[i] = first(x);", header=SUM, x=np.ones(8, np.float32))[0] == 1


@pytest.mark.parametrize("body, says", [
    ("y[i] = erf(x[i]);", r"source:2:\d+: error: .*'erf'"),
    ("y[i] = atomic_add(y, 1);", r"source:2:\d+: error: .*'atomic_add'"),
    ("x[i] = 1.0f;\ny[i] = 0.0f;", r"source:2:\d+: error: read-only variable is not assignable"),
    ("y[i] = max(x[i], 1);", r"source:2:\d+: error: call to 'max' is ambiguous"),
    ("y[i] = simd_sum(long(i));", "no SIMD-group operation on 64-bit"),
    ("simdgroup_matrix<half, 8, 8> m;\nsimdgroup_load(m, x, 8);\ny[i] = 0;", "source:3:.*no matching function"),
], ids=["no such function", "no such atomic", "write to an input", "mixed types", "64-bit sum", "matrix's type"])
def test_names_and_types_that_metal_lacks_do_not_compile(emulate, body, says):
    with pytest.raises(CompileError, match=says):
        emulate(body)


def test_limits_of_a_threadgroup_are_kept(emulate):
    with pytest.raises(LimitError, match=r"36000 bytes, 32768 are allowed \(line 2\)"):
        emulate("threadgroup float t[9000];\nt[i] = x[i];\ny[i] = t[i];")
    assert emulate("threadgroup float t[8192];\nt[i] = x[i];\ny[i] = t[i];")[5] == 1
    with pytest.raises(LimitError, match="1056 threads, 1024 are allowed"):
        emulate("if (i < 64) { y[i] = 0; }", n=1056)


def test_a_kernel_takes_31_buffers_at_most():
    names = [f"x{k}" for k in range(31)]
    kernel = metal_kernel("many", names, ["y"], "y[thread_position_in_grid.x] = x0;")
    with pytest.raises(LimitError, match="32 buffers, shapes included; 31 are allowed"):
        kernel(inputs=[1] * 31, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
               output_dtypes=[np.float32])


def test_arguments_that_fit_no_kernel_are_refused(emulate):
    with pytest.raises(ValueError, match="float64 has no place in a Metal kernel; use one of"):
        emulate("y[i] = x[i];", x=np.ones(64))
    with pytest.raises(ValueError, match="must be positive"):
        emulate("y[i] = x[i];", n=0, group=1)
