import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops


def test_scores_weigh_positive_dots_only(rng):
    q, weight, rows = (rng.normal(size=s).astype(np.float32) for s in ((3, 4, 8), (3, 4), (6, 8)))
    expected = np.einsum("th,thc->tc", weight, np.maximum(np.einsum("thw,cw->thc", q, rows), 0))
    np.testing.assert_allclose(np.array(ops.index_scores(*map(mx.array, (q, weight, rows)))), expected, atol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 40])
def test_equal_scores_go_to_the_lower_index(k, rng):
    scores = rng.integers(-3, 3, (9, 40)).astype(np.float32)  # many ties, with both signs and zeros
    scores[:, ::5] *= -0.0                                    # minus zero ties with zero
    scores[2, 10:] = -np.inf
    best = np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :k], axis=-1)
    np.testing.assert_array_equal(np.array(ops.top_k(mx.array(scores), k)), best)


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="5 of 4"):
        ops.top_k(mx.zeros((1, 4)), 5)
