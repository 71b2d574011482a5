import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking


def routed(logits, bias=None, table=None, ids=(), k=2, scale=1.5):
    arrays = [None if a is None else mx.array(a) for a in (logits, bias, table)]
    selected, weight = ops.route(*arrays, mx.array(ids, mx.int32), k, scale)
    return np.array(selected), np.array(weight)


def test_weights_come_from_the_probabilities_without_the_bias(units, implementation):
    logits, p = units["router.logits"], units["router.prob"].astype(np.float64)
    bias = np.linspace(-1, 1, 8, dtype=np.float32)
    selected, weight = routed(logits, bias, k=3)
    best = np.sort(np.argsort(-(p + bias), axis=-1)[:, :3], axis=-1)
    np.testing.assert_array_equal(selected, best)
    chosen = np.take_along_axis(p, best, axis=-1)
    np.testing.assert_allclose(weight, chosen / chosen.sum(axis=-1, keepdims=True) * 1.5, rtol=1e-6)  # float32


@pytest.mark.parametrize("tokens, experts, k", [(1, 256, 6), (5, 33, 6), (2, 8, 8), (130, 32, 1)])
def test_equal_scores_go_to_the_lower_id(tokens, experts, k, rng, implementation):
    logits = rng.integers(-2, 2, (tokens, experts)).astype(np.float32)
    best = np.sort(np.argsort(-logits, axis=-1, kind="stable")[:, :k], axis=-1)
    selected, _ = routed(logits, np.zeros(experts, np.float32), k=k)
    np.testing.assert_array_equal(selected, best)


def test_a_table_chooses_by_token_id_and_keeps_its_order(rng, implementation):
    logits, table = rng.normal(size=(3, 16)).astype(np.float32), np.array([[3, 1], [15, 0], [2, 9]], np.int32)
    selected, weight = routed(logits, table=table, ids=[2, 0, 2])
    np.testing.assert_array_equal(selected, [[2, 9], [3, 1], [2, 9]])
    p = np.sqrt(np.log1p(np.exp(np.take_along_axis(logits.astype(np.float64), selected, axis=-1))))
    np.testing.assert_allclose(weight, p / p.sum(axis=-1, keepdims=True) * 1.5, rtol=1e-6)  # float32


def test_weights_neither_overflow_nor_vanish(implementation):
    logits = np.array([[-80, -82, -84, -90], [3e4, 80, 0, -80]], np.float32)
    selected, weight = routed(logits, np.zeros(4, np.float32), k=2, scale=1.0)
    p = np.sqrt(np.logaddexp(logits.astype(np.float64), 0))[:, :2]
    np.testing.assert_array_equal(selected, [[0, 1], [0, 1]])
    np.testing.assert_allclose(weight, p / p.sum(axis=-1, keepdims=True), rtol=1e-5)  # e^-80 has 1e-6 of the exponent


@pytest.mark.parametrize("changes, message", [({}, "either"), ({"bias": np.zeros(4, np.float32), "k": 5}, "5 of 4")])
def test_what_cannot_be_chosen_from_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        routed(np.zeros((1, 4), np.float32), **changes)


def test_damaged_logits_choose_experts_that_exist(implementation):
    selected, _ = routed(np.full((1, 40), np.nan, np.float32), np.zeros(40, np.float32), k=6)
    assert len(set(selected[0])) == 6 and 0 <= selected.min() <= selected.max() < 40


def test_the_kernels_give_the_same_in_any_order_of_threads(rng, emulated):
    logits, table = rng.normal(size=(5, 33)).astype(np.float32), np.zeros((2, 6), np.int32)
    with checking(races=True, debug=True):
        routed(logits, bias=logits[0], k=6)
        routed(logits, table=table, ids=[0, 1, 1, 0, 1], k=6)
