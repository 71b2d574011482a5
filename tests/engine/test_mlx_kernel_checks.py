"""What passes as the reference's answer, and what does not."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.engine.mlx_kernel_checks import Equal, Near, Rounded
from ds4mlx.ops.kv_round import fp4_pack, fp8_pack

NEAR, EQUAL = Near(1e-3, "a reason"), Equal("a reason")
CHECKS = {"fp8": Rounded("fp8", 192, 64), "fp4": Rounded("fp4", 128, 64)}


@pytest.fixture(params=["fp8", "fp4"])
def packing(request):
    return request.param


@pytest.fixture
def rows(packing):
    """40 packed rows, and the check that goes with them."""
    v = mx.array(np.random.default_rng(7).standard_normal((40, CHECKS[packing].width), np.float32))
    return np.array(fp8_pack(v, 64) if packing == "fp8" else fp4_pack(v)), CHECKS[packing]


def nudged(rows, count, steps):
    """The rows with the codes of their first `count` bytes, none near the largest, so many steps further out."""
    other = rows.copy()
    places = np.argwhere((rows[:, :64] & 7) <= 7 - steps)[:count]
    other[tuple(places.T)] += steps
    return other


def test_an_error_counts_by_the_largest_value():
    found, expected = np.array([0.0, 100.05], np.float32), np.array([0.05, 100.0], np.float32)
    assert NEAR(found, expected).error == pytest.approx(5e-4, rel=1e-3) and NEAR(found, expected).passed
    assert not NEAR(found + np.float32(0.1), expected).passed


def test_a_value_that_is_not_finite_fails_and_is_counted():
    difference = NEAR(np.array([1.0, np.nan, np.inf]), np.ones(3))
    assert (difference.passed, difference.error, difference.note) == (False, None, "2 of 3 values are not finite")


def test_sums_may_come_in_any_number_of_parts():
    check, parts = Near(1e-6, "a reason", parts=True), np.ones((2, 4, 3), np.float32)
    assert check(parts, 2 * parts[:, :2]).passed and not check(parts, parts[:, :3]).passed


def test_of_whole_numbers_none_may_differ():
    assert EQUAL(np.arange(3), np.arange(3)).passed
    assert EQUAL(np.arange(3), np.array([0, 1, 3])).note == "1 of 3 entries differ"


def test_the_same_rows_are_zero_steps_apart(rows):
    packed, check = rows
    assert (check(packed, packed).error, check(packed, packed).passed) == (0, True)


def test_a_code_may_be_one_step_off_but_not_two(rows):
    packed, check = rows
    assert check(nudged(packed, 1, 1), packed).error == 1 and check(nudged(packed, 1, 1), packed).passed
    assert not check(nudged(packed, 1, 2), packed).passed


def test_many_codes_may_not_be_off_even_by_one_step(rows):
    packed, check = rows
    difference = check(nudged(packed, 200, 1), packed)
    assert difference.error == 1 and not difference.passed and difference.note.startswith("200 of ")


def test_a_block_may_have_the_scale_beside_its_own():
    """The largest of a block on either side of the power of two where its scale doubles."""
    v = np.random.default_rng(7).uniform(-400, 400, (1, 192)).astype(np.float32)
    below, above = (np.array(fp8_pack(mx.array(np.where(np.arange(192) == 5, largest, v).astype(np.float32)), 64))
                    for largest in (448, 448.001))
    difference = CHECKS["fp8"](below, above)
    assert difference.passed and "1 of 2 scales differ" in difference.note


def test_a_tail_is_compared_in_steps_of_float16():
    v = np.random.default_rng(7).standard_normal((1, 192)).astype(np.float32)
    packed = np.array(fp8_pack(mx.array(v), 64))
    off = packed.copy()
    off[:, -2] ^= 2     # the second bit of a half
    assert CHECKS["fp8"](off, packed).error == 2
