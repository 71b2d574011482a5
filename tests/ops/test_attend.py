from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.ops.kv_round import fp8_pack, fp8_unpack

EPS = 1e-6


class Case(NamedTuple):
    """The arguments of `ops.attention`, as NumPy arrays."""
    q: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    window: np.ndarray
    start: int
    rows: np.ndarray | None
    chosen: np.ndarray | None
    ratio: int
    sink: np.ndarray
    width: int = 128

    def run(self):
        arrays = [mx.array(a) if isinstance(a, np.ndarray) else a for a in self]
        return np.array(ops.attention(*arrays, EPS))


@pytest.fixture
def case(rng):
    """case(tokens, start, …): what a model would pass for a chunk, with rows of about unit size."""
    def make(tokens, start, ratio=0, k=0, heads=4, size=128, tail=64, width=128, packed=True, scale=1.0):
        def made(count):
            made = rng.normal(size=(count, size)).astype(np.float32) * scale
            return np.array(fp8_pack(mx.array(made), tail)) if packed else made
        angle = rng.uniform(0, 6, (tokens, tail // 2))
        count = (start + tokens) // ratio if ratio else 0
        chosen = None
        if k:
            chosen = np.sort(np.argsort(rng.random((tokens, max(count, k))))[:, :k].astype(np.int32))
        return Case(rng.normal(size=(tokens, heads * size)).astype(np.float32), np.cos(angle).astype(np.float32),
                    np.sin(angle).astype(np.float32), made(min(start, width) + tokens), start,
                    made(count) if count else None, chosen if count else None, ratio,
                    rng.normal(size=heads).astype(np.float32), width)
    return make


def decoded(rows, c):
    """Rows in float64, whatever their form."""
    size = c.q.shape[1] // len(c.sink)
    if rows is not None and rows.dtype == np.uint8:
        rows = np.array(fp8_unpack(mx.array(rows), size, 2 * c.cos.shape[1]))
    return np.zeros((0, size)) if rows is None else rows.astype(np.float64)


def keys(c, j):
    """The rows that query j sees, one position and one compressed row at a time."""
    window, rows, t, T = decoded(c.window, c), decoded(c.rows, c), c.start + j, len(c.q)
    base = c.start + T - len(window)
    near = [window[p - base] for p in range(max(t - c.width + 1, 0), t + 1)]
    visible = (t + 1) // c.ratio if c.ratio else 0
    far = range(min(visible, len(rows))) if c.chosen is None else [r for r in c.chosen[j] if r < visible]
    return np.array(near + [rows[r] for r in far])


def spelled_out(c):
    """The formula in float64, one query and head at a time, pairs as complex numbers."""
    T, H, tail = len(c.q), len(c.sink), 2 * c.cos.shape[1]
    q = c.q.reshape(T, H, -1).astype(np.float64)
    q /= np.sqrt((q ** 2).mean(-1, keepdims=True) + EPS)
    turn = (c.cos.astype(np.float64) + 1j * c.sin)[:, None]
    q[..., -tail:] = (q[..., -tail:].copy().view(np.complex128) * turn).view(np.float64)
    out = np.zeros_like(q)
    for j, h in np.ndindex(T, H):
        seen = keys(c, j)
        z = seen @ q[j, h] / np.sqrt(q.shape[-1])
        m = max(z.max(), c.sink[h])
        out[j, h] = np.exp(z - m) @ seen / (np.exp(z - m).sum() + np.exp(c.sink[h] - m))
    out[..., -tail:] = (out[..., -tail:].copy().view(np.complex128) * turn.conj()).view(np.float64)
    return out.reshape(T, -1)


@pytest.mark.parametrize(("tokens", "start", "ratio", "k"), [
    (1, 0, 0, 0), (1, 0, 4, 0), (3, 5, 4, 0), (5, 126, 0, 0), (1, 300, 4, 8), (9, 20, 4, 8), (2, 254, 128, 0)])
def test_the_sum_over_what_a_query_sees(case, tokens, start, ratio, k):
    c = case(tokens, start, ratio, k)
    with ops.only("reference"):
        np.testing.assert_allclose(c.run(), spelled_out(c), atol=4e-6)  # float32 sums against float64


def test_a_chunk_is_attended_in_blocks_of_queries(case):
    c = case(130, 70, 4, width=16)
    with ops.only("reference"):
        np.testing.assert_allclose(c.run(), spelled_out(c), atol=4e-6)
