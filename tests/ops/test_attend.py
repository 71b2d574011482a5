import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops

T, H, D, R, C = 5, 3, 16, 7, 6


def spelled_out(q, keys, visible, sink):
    """The formula, one query and head at a time, in float64. keys(t) and visible(t) give a query's own."""
    out = np.zeros(q.shape)
    for t, h in np.ndindex(*q.shape[:2]):
        seen = keys(t)[visible(t)].astype(np.float64)
        weight = np.exp(seen @ q[t, h].astype(np.float64) / np.sqrt(D))
        out[t, h] = weight @ seen / (weight.sum() + np.exp(float(sink[h])))
    return out


@pytest.fixture
def case(rng):
    q, window, sink = rng.normal(size=(T, H, D)), rng.normal(size=(R, D)), rng.normal(size=H)
    window_mask, rows_mask = rng.random((T, R)) < 0.6, rng.random((T, C)) < 0.5
    window_mask[:, 0] = True
    return [a.astype(np.float32) for a in (q, window, sink)] + [window_mask, rows_mask]


def test_rows_shared_by_all_queries(case, rng):
    q, window, sink, window_mask, rows_mask = case
    rows = rng.normal(size=(C, D)).astype(np.float32)
    o = ops.attend(*map(mx.array, (q, window, window_mask, rows, rows_mask, sink)))
    expected = spelled_out(q, lambda t: np.concatenate([window, rows]),
                           lambda t: np.concatenate([window_mask[t], rows_mask[t]]), sink)
    np.testing.assert_allclose(np.array(o), expected, atol=2e-6)  # float32 sums against float64


def test_rows_of_each_query(case, rng):
    q, window, sink, window_mask, rows_mask = case
    rows = rng.normal(size=(T, C, D)).astype(np.float32)
    o = ops.attend(*map(mx.array, (q, window, window_mask, rows, rows_mask, sink)))
    expected = spelled_out(q, lambda t: np.concatenate([window, rows[t]]),
                           lambda t: np.concatenate([window_mask[t], rows_mask[t]]), sink)
    np.testing.assert_allclose(np.array(o), expected, atol=2e-6)


def test_a_large_sink_takes_all_the_mass(case):
    q, window, _, window_mask, _ = case
    o = ops.attend(mx.array(q), mx.array(window), mx.array(window_mask), None, None, mx.full((H,), 60.0))
    assert mx.abs(o).max().item() < 1e-20
