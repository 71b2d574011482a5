import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def brute_force(scores, start, ratio, k):
    """By (seen first, higher score first, lower index first)."""
    chosen = []
    for t, row in enumerate(scores):
        seen = (start + t + 1) // ratio
        order = sorted(range(len(row)), key=lambda c: (c >= seen, -row[c] if c < seen else 0, c))
        chosen.append(sorted(order[:k]))
    return np.array(chosen)


def check_selection(scores, start, ratio, k):
    got = np.array(ops.select_rows(mx.array(scores), start, ratio, k))
    np.testing.assert_array_equal(got, brute_force(scores, start, ratio, k))


def test_scores_weigh_positive_dots_only(rng):
    q, weight, rows = normal(rng, 3, 4, 8), normal(rng, 3, 4), normal(rng, 6, 8)
    expected = 0.5 * np.einsum("th,thc->tc", weight, np.maximum(np.einsum("thw,cw->thc", q, rows), 0))
    np.testing.assert_allclose(np.array(ops.index_scores(*map(mx.array, (q, weight, rows)), 0.5)), expected, atol=1e-5)


def test_the_tail_of_a_query_is_turned(rng):
    q, angle = normal(rng, 2, 3, 32), normal(rng, 2, 4)
    got = np.array(ops.index_queries(mx.array(q), mx.cos(mx.array(angle)), mx.sin(mx.array(angle)), packed=False))
    turned = (q[..., 24::2] + 1j * q[..., 25::2]) * np.exp(1j * angle)[:, None]
    np.testing.assert_array_equal(got[..., :24], q[..., :24])
    np.testing.assert_allclose(got[..., 24::2] + 1j * got[..., 25::2], turned, atol=1e-6)  # a few ulps of |q| < 4


@pytest.mark.parametrize("k", [1, 7, 40])
def test_equal_scores_go_to_the_lower_index(k, rng):
    scores = rng.integers(-3, 3, (9, 40)).astype(np.float32)  # many ties, with both signs and zeros
    scores[:, ::5] *= -0.0                                    # minus zero ties with zero
    scores[2, 10:] = -np.inf
    best = np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :k], axis=-1)
    np.testing.assert_array_equal(np.array(ops.top_k(mx.array(scores), k)), best)
    check_selection(scores, 4 * 40, 4, k)


@pytest.mark.parametrize("seen", [0, 1, 6, 7, 8, 20])
def test_hidden_rows_fill_from_the_lowest(seen, rng):
    check_selection(normal(rng, 1, 20), max(0, 4 * seen - 1), 4, 7)


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="5 of 4"):
        ops.top_k(mx.zeros((1, 4)), 5)
    with pytest.raises(ValueError, match="5 of 4"):
        ops.select_rows(mx.zeros((1, 4)), 0, 4, 5)
