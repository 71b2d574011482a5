"""Kernels of the usual kinds, compared with NumPy."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.metal_kernels.emulator import metal_kernel

RMS_NORM = """
    threadgroup float partial[32];  // one for each SIMD-group
    uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
    const device float4* row = (const device float4*)(x + threadgroup_position_in_grid.y * D);
    float sum = 0;
    for (uint k = t; k < D / 4; k += threads_per_threadgroup.x) { sum += dot(row[k], row[k]); }
    sum = simd_sum(sum);
    if (lane == 0) { partial[simdgroup_index_in_threadgroup] = sum; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = simd_sum(lane < simdgroups_per_threadgroup ? partial[lane] : 0.0f);
    device float4* out = (device float4*)(y + threadgroup_position_in_grid.y * D);
    for (uint k = t; k < D / 4; k += threads_per_threadgroup.x) { out[k] = row[k] * metal::rsqrt(sum / D + 1e-6f); }
"""
Q8_MATVEC = """
    // One SIMD-group a row; a lane takes every 32nd block of 2 bytes of scale and 32 weights.
    uint row = thread_position_in_grid.y;
    float sum = 0;
    for (uint b = thread_index_in_simdgroup; b < K / 32; b += 32) {
        const device uint8_t* block = w + (row * (K / 32) + b) * 34;
        float part = 0;
        for (uint k = 0; k < 32; ++k) { part += float(((const device int8_t*)block)[2 + k]) * x[b * 32 + k]; }
        sum += float(*(const device half*)block) * part;
    }
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) { y[row] = sum; }
"""
MATMUL = """
    // c = a b^T by 8x8 tiles, one SIMD-group a tile; b's tile goes through threadgroup memory.
    threadgroup half tile[64];
    uint lane = thread_index_in_simdgroup;
    uint m = threadgroup_position_in_grid.y * 8, n = threadgroup_position_in_grid.x * 8;
    simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k = 0; k < K; k += 8) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < 64; i += 32) { tile[i] = b[(n + i / 8) * K + k + i % 8]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_matrix<half, 8, 8> left, right;
        simdgroup_load(left, a + m * K + k, K);
        simdgroup_load(right, tile, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_store(sum, c + m * N + n, N);
"""


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float16, 1e-3)])  # half: one rounding
def test_a_template_takes_the_dtype_and_the_edge_is_the_bodys(dtype, tolerance, rng):
    x = rng.standard_normal(1003).astype(dtype)
    kernel = metal_kernel("silu", ["x", "s"], ["y"], """
        uint i = thread_position_in_grid.x;
        if (i >= uint(x_shape[0])) { return; }
        float v = float(x[i]) * s;
        y[i] = T(v / (1.0f + metal::precise::exp(-v)));
    """)
    (y,) = kernel(inputs=[x, 1.5], template=[("T", dtype)], grid=(1024, 1, 1), threadgroup=(256, 1, 1),
                  output_shapes=[x.shape], output_dtypes=[dtype])
    v = x.astype(np.float64) * 1.5
    np.testing.assert_allclose(y, v / (1 + np.exp(-v)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_simd_sums_and_threadgroup_memory_make_a_norm(threads, rng):
    x = rng.standard_normal((3, 256)).astype(np.float32)
    kernel = metal_kernel("rms_norm", ["x"], ["y"], RMS_NORM)
    (y,) = kernel(inputs=[x], template=[("D", 256)], grid=(threads, 3, 1), threadgroup=(threads, 1, 1),
                  output_shapes=[x.shape], output_dtypes=[np.float32], check_races=True)
    np.testing.assert_allclose(y, x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), rtol=1e-5)  # float32 sums


def test_quantised_bytes_times_a_vector(rng):
    scales, codes = rng.uniform(0.5, 1, (16, 64, 1)).astype(np.float16), rng.integers(-128, 128, (16, 64, 32), np.int8)
    w = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1).reshape(16, -1)
    x = rng.standard_normal(64 * 32).astype(np.float32)
    kernel = metal_kernel("q8_matvec", ["w", "x"], ["y"], Q8_MATVEC)
    (y,) = kernel(inputs=[w, x], template=[("K", x.size)], grid=(32, 16, 1), threadgroup=(32, 2, 1),
                  output_shapes=[(16,)], output_dtypes=[np.float32], debug=True)
    expected = (scales.astype(np.float64) * codes).reshape(16, -1) @ x
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=0.05)  # sums of 2048 products of about 50


def test_matrices_of_half_add_up_in_float(rng):
    a, b = (rng.standard_normal((rows, 32)).astype(np.float16) for rows in (24, 16))
    kernel = metal_kernel("tile_matmul", ["a", "b"], ["c"], MATMUL)
    (c,) = kernel(inputs=[a, b], template=[("K", 32), ("N", 16)], grid=(64, 3, 1), threadgroup=(32, 1, 1),
                  output_shapes=[(24, 16)], output_dtypes=[np.float32], check_races=True)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.T.astype(np.float64), atol=1e-5)


def test_mlx_arrays_go_in_and_come_out(emulate):
    x = mx.arange(64, dtype=mx.bfloat16)
    y = emulate("y[i] = x[i] + x[i];", x=x, dtype=mx.bfloat16)
    assert y.dtype == mx.bfloat16 and mx.array_equal(y, x + x)
    assert isinstance(emulate("y[i] = x[i];", as_mlx=True), mx.array)


def test_python_numbers_are_what_mlx_makes_of_them():
    body = "y[0] = thread_position_in_grid.x + n + s + (yes ? 1 : 0);"
    kernel = metal_kernel("scalars", ["n", "s", "yes"], ["y"], body)
    (y,) = kernel(inputs=[-7, 0.5, True], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
                  output_dtypes=[np.float32])
    assert y == 1 - 7 + 2.0 ** 32 + 0.5  # an unsigned and an int make an unsigned
    assert y.dtype == np.float32


def test_a_read_only_file_map_is_read_in_place_and_may_be_large(tmp_path, emulate):
    np.arange(20 << 20, dtype=np.float32).tofile(tmp_path / "weights")
    x = np.memmap(tmp_path / "weights", np.float32, mode="r")
    assert emulate("y[i] = x[i * 300000];", x=x)[63] == 63 * 300000
    assert emulate("y[i] = x[i + 5];", x=x[:100])[63] == 68


def test_a_view_keeps_its_strides_when_asked(rng):
    x = rng.standard_normal((8, 6)).astype(np.float32)
    kernel = metal_kernel("transposed", ["x"], ["y"], """
        uint i = thread_position_in_grid.x;
        y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
    """, ensure_row_contiguous=False)
    (y,) = kernel(inputs=[x.T], grid=(48, 1, 1), threadgroup=(48, 1, 1), output_shapes=[(6, 8)],
                  output_dtypes=[np.float32])
    assert (y == x.T).all()


def test_outputs_may_start_from_a_value_and_be_added_to_atomically():
    kernel = metal_kernel("histogram", ["x"], ["y"], """
        threadgroup atomic_uint local[4];
        uint t = thread_index_in_threadgroup;
        if (t < 4) { atomic_store_explicit(&local[t], 0, memory_order_relaxed); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&local[x[thread_position_in_grid.x]], 1, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t < 4) { atomic_fetch_add_explicit(&y[t], atomic_load_explicit(&local[t], memory_order_relaxed),
                                               memory_order_relaxed); }
    """, atomic_outputs=True)
    x = np.arange(256, dtype=np.uint8) % 3
    (y,) = kernel(inputs=[x], grid=(256, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(4,)], output_dtypes=[np.uint32],
                  init_value=0, check_races=True)
    assert y.tolist() == [86, 85, 85, 0]


def test_a_grid_that_threadgroups_do_not_divide_has_smaller_ones_at_its_end():
    kernel = metal_kernel("positions", ["x"], ["y"], """
        uint3 p = thread_position_in_grid;
        y[p.y * 5 + p.x] = threads_per_threadgroup.x * 100 + threadgroup_position_in_grid.y * 10 +
            thread_index_in_threadgroup;
    """)
    (y,) = kernel(inputs=[1], grid=(5, 2, 1), threadgroup=(3, 1, 1), output_shapes=[(2, 5)], output_dtypes=[np.int32])
    assert y.tolist() == [[300, 301, 302, 200, 201], [310, 311, 312, 210, 211]]


def test_large_arrays_of_mlx_may_be_read_as_vectors():
    """MLX aligns its memory on a CPU to 8 bytes, Metal's to pages; above 64 MiB inputs are used where they lie."""
    x = mx.ones((17 << 20,))
    body = "uint i = thread_position_in_grid.x;\ny[i] = (*(const device float4*)(x + 4 * i)).w;"
    (y,) = metal_kernel("wide", ["x"], ["y"], body)(
        inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)], output_dtypes=[mx.float32])
    assert mx.array_equal(y, mx.ones(64))


def test_subnormal_floats_are_zero_and_subnormal_halves_are_not(emulate):
    tiny = np.full(64, 2.0 ** -127, np.float32)
    assert emulate("y[i] = x[i] * 4.0f;", x=tiny)[0] == 0
    assert emulate("y[i] = x[i] * 0.5f;", x=tiny * 2)[0] == 0
    assert emulate("y[i] = float(x[i]);", x=np.full(64, 2.0 ** -24, np.float16))[0] == 2.0 ** -24
    assert emulate("y[i] = half(x[i]);", x=np.full(64, 2.0 ** -24, np.float32), dtype=np.float16)[0] == 2.0 ** -24
