from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
ALL = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0}


def picks(n=1000, **changes):
    """How often each token is chosen over evenly spread uniforms, in parts of n."""
    logits = mx.array(LOGITS)
    return Counter(ops.sample(logits, (i + 0.5) / n, **(ALL | changes)).item() for i in range(n))


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
    assert ops.sample(mx.array([0.0, 3.0, 3.0]), 0.9, **(ALL | changes)).item() == 1


def test_a_forbidden_token_is_never_chosen():
    logits = mx.array([-np.inf, 0.0, -np.inf, 0.0], mx.float32)
    assert {ops.sample(logits, u, **ALL).item() for u in (0.0, 0.49, 0.51, np.nextafter(1.0, 0.0))} == {1, 3}


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-46, 1e-300])
def test_however_cold_the_best_token_is_chosen(temperature):
    logits = mx.array([1.0, 9.0, 8.0, -np.inf])
    assert {ops.sample(logits, u, **(ALL | {"temperature": temperature})).item() for u in (0.0, 0.5, 0.999)} == {1}


def test_logits_at_the_ends_of_float32_are_still_in_order():
    assert ops.sample(mx.array([-3e38, 3e38, 0.0]), 0.9, **(ALL | {"temperature": 0.5})).item() == 1


def test_top_p_of_one_cuts_nothing_of_a_flat_distribution_over_the_vocabulary():
    assert ops.sample(mx.linspace(0, -0.01, 129280), np.nextafter(1.0, 0.0), **ALL).item() == 129279
