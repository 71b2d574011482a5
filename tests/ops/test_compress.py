import mlx.core as mx
import numpy as np

from ds4mlx import ops


def test_each_channel_has_its_own_softmax(rng):
    k, s = rng.normal(size=(2, 3, 8, 4))
    weight = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    pooled = ops.compress(mx.array(k), mx.array(s))
    np.testing.assert_allclose(np.array(pooled), (weight * k).sum(axis=1), atol=1e-6)  # float32 against float64


def test_a_slot_with_score_minus_infinity_is_left_out(rng):
    k, s = rng.normal(size=(2, 1, 4, 4)).astype(np.float32)
    s[:, :2] = -np.inf
    k[:, :2] = 1e9
    np.testing.assert_array_equal(np.array(ops.compress(mx.array(k), mx.array(s))),
                                  np.array(ops.compress(mx.array(k[:, 2:]), mx.array(s[:, 2:]))))
