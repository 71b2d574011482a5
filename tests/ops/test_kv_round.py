from importlib.resources import files

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking
from ds4mlx.ops.kernel import Kernel
from ds4mlx.ops.kv_round import pow2_ceil

E4M3 = [(m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(values, size):
    """The code of the nearest of ascending `values`, of two as near the even one."""
    above = np.searchsorted(values, size).clip(0, len(values) - 1)
    below = (above - 1).clip(0)
    up, down = np.take(values, above) - size, size - np.take(values, below)
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def rounded(v, values, top, block, least):
    """float64, by the definition: a search for the scale and for the nearest code."""
    blocks = v.astype(np.float64).reshape(*v.shape[:-1], -1, block)
    most = np.maximum(np.abs(blocks).max(-1, keepdims=True), least)
    powers = 2.0 ** np.arange(-126, 128)
    scale = powers[np.searchsorted(powers * top, most)]
    return (np.take(values, nearest(values, np.abs(blocks) / scale)) * scale * np.sign(blocks)).reshape(v.shape)


@pytest.fixture
def hard(rng):
    """Rows of 128: every size, ties of both formats, subnormal codes, and zeros."""
    rows = rng.normal(size=(96, 128)) * 10.0 ** rng.integers(-36, 31, (96, 1))
    rows[:2] = [[0.0], [-0.0]]
    rows[2:20] = rng.integers(-128, 128, (18, 128)) / 8
    rows[20:40, 1:] = rng.integers(-512, 512, (20, 127)) / 1024
    rows[20:40, 0] = 448
    rows[42:60] = rng.integers(-24, 25, (18, 128)) / 4
    rows[42:60, ::32] = 6
    rows[40:42] = np.ldexp(1.0, rng.integers(-140, 100, (2, 128)))
    return rows.astype(np.float32)


HEADER = files("ds4mlx.metal_kernels").joinpath("rows.h").read_text("ascii")
FP8 = """uint r = threadgroup_position_in_grid.x, j = 4 * thread_index_in_threadgroup;
store4<D, 64>(packed, r, j, load4<D, 64>(rows, r, j));"""
FP4 = """uint r = thread_position_in_grid.x / (D / 4), j = thread_position_in_grid.x % (D / 4) * 4;
float4 v = float4(rows[r * D + j], rows[r * D + j + 1], rows[r * D + j + 2], rows[r * D + j + 3]);
store4_fp4<D>(packed, r, j, hadamard<D>(v, thread_index_in_simdgroup));"""
READ_FP4 = """uint r = thread_position_in_grid.x / (D / 4), j = thread_position_in_grid.x % (D / 4) * 4;
float scale = 0.5f * e8m0(rows[r * Fp4Row<D>::bytes + Fp4Row<D>::codes + j / 32]);
*(device float4*)(packed + r * D + j) = float4(load4_fp4<D>(rows, r, j)) * scale;"""


def by_threads(body, rows, shape, dtype=mx.uint8, D=128):
    """`body` for each row of D channels, by D / 4 threads; a threadgroup has D / 4 or one simdgroup."""
    launch, threads = Kernel("rows_h", ("rows",), ("packed",), HEADER, body), max(D // 4, 32)
    return launch([rows], [(shape, dtype)], (shape[0] * D // 4 // threads, 1, 1), (threads, 1, 1), [("D", D)])[0]


@pytest.mark.parametrize("D", [128, 256])   # 194 bytes, so every other row begins between two words; 324 bytes
def test_kernels_write_and_read_attention_rows_as_the_reference(hard, emulated, D):
    rows = mx.array(hard.reshape(-1, D))
    packed = ops.fp8_pack(rows, 64)
    with checking(races=True, debug=True):
        assert mx.array_equal(by_threads(FP8, rows, packed.shape, D=D), packed)
        assert mx.array_equal(by_threads(FP8, packed, rows.shape, mx.float32, D), ops.fp8_unpack(packed, D, 64))


@pytest.mark.parametrize("W", [64, 128])   # for 64 the transform of a transform is exact, so that ties stay ties
def test_kernels_write_and_read_indexer_rows_as_the_reference(hard, emulated, W):
    """Exact, as MLX and the kernel go through the butterflies of a transform in the same order on a CPU."""
    v = mx.hadamard_transform(mx.array(hard.reshape(-1, W)))
    packed = ops.fp4_pack(v)
    with checking(races=True, debug=True):
        assert mx.array_equal(ops.fp4_unpack(by_threads(FP4, v, packed.shape, D=W), W), ops.fp4_unpack(packed, W))
        assert mx.array_equal(by_threads(READ_FP4, packed, v.shape, mx.float32, W), ops.fp4_unpack(packed, W))


def unpacked_fp4(v):
    return np.array(ops.fp4_unpack(ops.fp4_pack(mx.array(v)), v.shape[-1]))


def test_fp8_is_exactly_the_independent_one(units):
    found = ops.fp8_unpack(ops.fp8_pack(mx.array(units["fp8.in"]), 64), units["fp8.in"].shape[-1], 64)
    np.testing.assert_array_equal(np.array(found)[..., :-64], units["fp8.out"][..., :-64])


def test_fp4_is_exactly_the_independent_one(units):
    np.testing.assert_array_equal(unpacked_fp4(units["fp4.in"]), units["fp4.out"])


def test_fp8_takes_the_nearest_code_under_the_least_power_of_two(hard):
    found = ops.fp8_unpack(ops.fp8_pack(mx.array(hard), 64), 128, 64)
    np.testing.assert_array_equal(np.array(found)[:, :64], rounded(hard[:, :64], E4M3, 448, 64, 1e-4))


@pytest.mark.parametrize("W", [64, 128])   # for 64 the transform of a transform is exact, so that ties stay ties
def test_fp4_takes_the_nearest_code_under_the_least_power_of_two(hard, W):
    v = mx.hadamard_transform(mx.array(hard.reshape(-1, W)))
    expected = rounded(np.array(mx.hadamard_transform(v)), E2M1, 6, 32, 6 * 2.0 ** -126)
    np.testing.assert_array_equal(np.array(ops.fp4_unpack(ops.fp4_pack(v), W)), expected)


def test_the_transform_is_sylvesters(rng):
    """In steps of half a code at most: what differs in the last bit may round the other way."""
    matrix = np.ones((1, 1))
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    v = rng.normal(size=(20, 128))
    found = unpacked_fp4(v.astype(np.float32))
    expected = rounded(v @ matrix / np.sqrt(128), E2M1, 6, 32, 6 * 2.0 ** -126)
    assert (found == expected).mean() > 0.999 and np.abs(found - expected).max() <= 1


def test_float16_tails_are_finite_and_the_nearest():
    row = np.zeros((1, 72), np.float32)
    row[0, 64:] = [1e30, -1e30, 65519, 65520, 2049, 2051, 2 ** -24, 1e-9]
    tail = np.array(ops.fp8_unpack(ops.fp8_pack(mx.array(row), 8), 72, 8))[0, 64:]
    np.testing.assert_array_equal(tail, [65504, -65504, 65504, 65504, 2048, 2052, 2 ** -24, 0])


@pytest.mark.parametrize("width, tail, size", [(512, 64, 584), (128, 64, 194), (192, 64, 258), (66, 2, 70)])
def test_bytes_of_an_attention_row(width, tail, size):
    packed = ops.fp8_pack(mx.full((3, 2, width), 1.0), tail)
    assert packed.shape == (3, 2, size) and ops.pack_bytes(width, tail) == size


def test_layout_of_an_attention_row():
    row = np.zeros((1, 66), np.float32)
    row[0, [0, 1, 2, 64]] = [448 * 4, -4, 4 * 2.0 ** -9, 1]
    packed = np.array(ops.fp8_pack(mx.array(row), 2))[0]
    assert list(packed[:4]) == [0x7E, 0xB8, 1, 0] and list(packed[64:]) == [129, 0, 0x00, 0x3C, 0, 0]


def test_layout_of_an_indexer_row():
    wanted = np.zeros(128, np.float32)
    wanted[[0, 1, 2, 127]] = [6, -0.5, 3, -8]
    packed = np.array(ops.fp4_pack(mx.hadamard_transform(mx.array(wanted[None]))))[0]
    assert packed.shape == (68,) and list(packed[:3]) == [0x97, 0x05, 0]
    assert packed[63] == 0xE0 and list(packed[64:]) == [127, 1, 1, 128]


def test_rows_from_a_cache_pack_without_loss(hard):
    row = ops.fp8_unpack(ops.fp8_pack(mx.array(hard), 64), 128, 64)
    assert mx.array_equal(ops.fp8_unpack(ops.fp8_pack(row, 64), 128, 64), row)


@pytest.mark.parametrize("width, tail", [(100, 64), (64, 64)])
def test_a_width_without_whole_blocks_is_refused(width, tail):
    with pytest.raises(ValueError, match="needed a multiple of 64"):
        ops.fp8_pack(mx.zeros((1, width)), tail)


def test_an_indexer_width_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="power of two"):
        ops.fp4_pack(mx.zeros((1, 96)))


def test_powers_of_two_stay_and_what_is_above_goes_up():
    x = np.array([1.0, 2.0 ** -100, 0.75, 3.0], np.float32)
    above = np.nextafter(x, np.float32(np.inf))
    np.testing.assert_array_equal(np.array(pow2_ceil(mx.array(x))), [1.0, 2.0 ** -100, 1.0, 4.0])
    np.testing.assert_array_equal(np.array(pow2_ceil(mx.array(above))), [2.0, 2.0 ** -99, 1.0, 4.0])
