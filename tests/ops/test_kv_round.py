import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.ops.kv_round import pow2_ceil


def test_fp8_is_exactly_the_independent_one(units):
    np.testing.assert_array_equal(np.array(ops.fp8_round(mx.array(units["fp8.in"]), tail=64)), units["fp8.out"])


def test_fp4_is_exactly_the_independent_one(units):
    np.testing.assert_array_equal(np.array(ops.fp4_round(mx.array(units["fp4.in"]))), units["fp4.out"])


def test_rounded_rows_round_to_themselves(units):
    row = mx.array(units["fp8.out"])
    assert mx.array_equal(ops.fp8_round(row, tail=64), row)


def test_float16_holds_every_value_of_a_row_of_normal_size(rng):
    row = ops.fp8_round(mx.array(rng.normal(size=(64, 128)).astype(np.float32)), tail=0)  # steps of 2^-17 at least
    assert mx.array_equal(row.astype(mx.float16).astype(mx.float32), row)
    v = ops.fp4_round(mx.array(rng.normal(size=(64, 128)).astype(np.float32)))
    assert mx.array_equal(v.astype(mx.float16).astype(mx.float32), v)


def test_powers_of_two_stay_and_what_is_above_goes_up():
    x = np.array([1.0, 2.0 ** -100, 0.75, 3.0], np.float32)
    above = np.nextafter(x, np.float32(np.inf))
    np.testing.assert_array_equal(np.array(pow2_ceil(mx.array(x))), [1.0, 2.0 ** -100, 1.0, 4.0])
    np.testing.assert_array_equal(np.array(pow2_ceil(mx.array(above))), [2.0, 2.0 ** -99, 1.0, 4.0])
