from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
ALL = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0}


def sample(logits, uniform, **changes):
    """The token of one row."""
    how = ALL | changes
    return ops.sample(logits[None], *(np.array([how.get(name, uniform)]) for name in ("uniform", *ALL))).item()


def picks(n=1000, **changes):
    """How often each token is chosen over evenly spread uniforms, in parts of n."""
    logits = mx.array(LOGITS)
    return Counter(sample(logits, (i + 0.5) / n, **changes) for i in range(n))


def test_each_token_gets_its_probability():
    counts = picks()
    assert [counts[i] for i in range(4)] == pytest.approx([100, 400, 200, 300], abs=1)  # one boundary each


def test_temperature_divides_the_logits():
    p = np.exp(LOGITS * 2) / np.exp(LOGITS * 2).sum()
    counts = picks(temperature=0.5)
    assert [counts[i] for i in range(4)] == pytest.approx(list(1000 * p), abs=1)


@pytest.mark.parametrize("changes, left", [({"top_k": 2}, {1, 3}), ({"min_p": 0.6}, {1, 3}),
                                           ({"min_p": 0.3}, {1, 2, 3}),
                                           ({"top_p": 0.5}, {1, 3}), ({"top_p": 0.3}, {1}), ({"top_p": 1e-9}, {1}),
                                           ({"top_k": 3, "min_p": 0.6, "top_p": 0.99}, {1, 3})])
def test_what_is_cut_is_never_chosen_and_what_is_left_is(changes, left):
    assert set(picks(100, **changes)) == left


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_p": 0.0}])
def test_greedy_takes_the_lowest_of_equal_ids(changes):
    assert sample(mx.array([0.0, 3.0, 3.0]), 0.9, **changes) == 1


def test_a_forbidden_token_is_never_chosen():
    logits = mx.array([-np.inf, 0.0, -np.inf, 0.0], mx.float32)
    assert {sample(logits, u) for u in (0.0, 0.49, 0.51, np.nextafter(1.0, 0.0))} == {1, 3}


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-46, 1e-300])
def test_however_cold_the_best_token_is_chosen(temperature):
    logits = mx.array([1.0, 9.0, 8.0, -np.inf])
    assert {sample(logits, u, temperature=temperature) for u in (0.0, 0.5, 0.999)} == {1}


def test_logits_at_the_ends_of_float32_are_still_in_order():
    assert sample(mx.array([-3e38, 3e38, 0.0]), 0.9, temperature=0.5) == 1


def test_top_p_of_one_cuts_nothing_of_a_flat_distribution_over_the_vocabulary():
    assert sample(mx.linspace(0, -0.01, 129280), np.nextafter(1.0, 0.0)) == 129279


def interval(logits, token, temperature, top_k, min_p, top_p):
    """[low, high] of the uniforms that choose `token`, in float64 and with a sort."""
    order = np.argsort(-logits, kind="stable")[:top_k or None]
    p = np.exp((logits[order] - logits[order[0]]) / np.float64(temperature))
    likely, reached = p >= min_p, np.cumsum(p) - p < top_p * p.sum()
    total = np.cumsum(np.where(likely & (reached | (top_p >= 1)), p, 0))
    place = list(order).index(token)
    return (total[place - 1] if place else 0) / total[-1], total[place] / total[-1]


CUTS = [{}, {"temperature": 0.3}, {"top_k": 700}, {"top_k": 7, "top_p": 0.8}, {"min_p": 0.02}, {"top_p": 0.95},
        {"temperature": 4.0, "top_k": 900, "min_p": 0.001, "top_p": 0.9}]


# 5000: more tokens than the kernel resolves at once, whatever the first cut leaves of them
@pytest.mark.parametrize("vocabulary", [777, 5000, pytest.param(129280, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("changes", CUTS)
def test_the_uniform_lies_in_the_interval_of_the_chosen_token(vocabulary, changes, rng, implementation):
    logits = (3 * rng.normal(size=vocabulary)).astype(np.float32)
    for uniform in (0.0, *rng.random(3), 0.9999999):
        how = ALL | changes
        low, high = interval(logits, sample(mx.array(logits), uniform, **how), **how)
        assert low - 1e-6 <= uniform <= high + 1e-6   # a float32 uniform and exp round by 1e-7


def test_of_equal_logits_the_lower_ids_come_first(implementation):
    logits = mx.repeat(mx.array([1.0, 2.0]), 2500)    # the best are ids 2500 ... 4999, each with 1 / 2500
    chosen = [sample(logits, (i + 0.5) / 2500, top_k=2500) for i in (0, 777, 2499)]
    assert chosen == [2500, 3277, 4999]
    halves = [sample(logits, u, min_p=1.0, top_p=0.5) for u in (0.0, 0.9999)]
    assert halves == [2500, 2500 + int(0.9999 * 1250 * (1 + np.exp(-1)))]  # half of everything, not of the best


ONE_LEFT = np.full(600, -np.inf, np.float32)
ONE_LEFT[431] = -5.0
STEPS = np.arange(600, dtype=np.float32)
WIDE = np.linspace(-3e38, 3e38, 600, dtype=np.float32)


@pytest.mark.parametrize("logits, changes, expected", [
    (ONE_LEFT, {}, 431), (ONE_LEFT, {"top_k": 5, "min_p": 1.0, "top_p": 1e-9, "temperature": 1e30}, 431),
    (WIDE, {}, 599), (WIDE, {"temperature": 1e-38}, 599), (WIDE, {"temperature": 1e38, "top_k": 1}, 599),
    (STEPS, {"temperature": 1e300, "min_p": 1.0}, 1), (STEPS, {"top_p": 1e-30}, 599),
    (-WIDE, {"top_k": 5000, "temperature": 1e-300}, 0), (np.zeros(600, np.float32), {"top_k": 1}, 0),
    (np.zeros(4, np.float32), {"top_p": 0.5}, 1)])  # two of four are exactly half
def test_extremes(logits, changes, expected, implementation):
    assert sample(mx.array(logits), 0.998, **changes) == expected


def test_every_row_is_sampled_in_its_own_way(rng, implementation):
    logits = mx.array((3 * rng.normal(size=(len(CUTS) + 1, 5000))).astype(np.float32))
    ways = [ALL | changes for changes in [*CUTS, {"temperature": 0.0, "top_k": 3}]]     # the last is greedy
    how = {name: np.array([way[name] for way in ways]) for name in ALL}
    together = ops.sample(logits, np.full(len(ways), 0.7), **how).tolist()
    assert together == [sample(row, 0.7, **way) for row, way in zip(logits, ways, strict=True)]


def test_rows_that_are_all_greedy_take_the_lowest_of_equal_ids(implementation):
    how = {"uniform": 0.9, **ALL, "temperature": 0.0}
    logits = mx.array([[0.0, 3.0, 3.0], [-mx.inf, -5.0, -5.0], [7.0, -0.0, 0.0]])
    for where in (np.array, mx.array):      # known on the host, or only on the device
        assert ops.sample(logits, **{name: where([value] * 3) for name, value in how.items()}).tolist() == [1, 1, 0]


def test_parameters_of_another_number_of_rows_are_refused():
    with pytest.raises(ValueError, match="sample: logits"):
        ops.sample(mx.zeros((2, 5)), *(np.array([0.5]) for _ in range(5)))


def test_subnormal_logits_are_equal_where_a_gpu_takes_them_for_zero(emulated):
    logits = mx.array((1e-42 * (np.arange(600) % 37)).astype(np.float32))
    chosen = [sample(logits, (i + 0.5) / 300, top_k=300) for i in (0, 150, 299)]
    assert chosen == [0, 150, 299]


def test_the_kernel_gives_the_same_token_in_any_order_of_threads(rng, emulated):
    logits = mx.array((3 * rng.normal(size=777)).astype(np.float32))
    with checking(races=True, debug=True):
        sample(logits, 0.9, top_k=700, min_p=1e-4, top_p=0.95)
