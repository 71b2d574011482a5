from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking
from ds4mlx.ops.kernel import observe
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


def keys(c):
    """The rows that each query sees, one position and one compressed row at a time."""
    window, rows = decoded(c.window, c), decoded(c.rows, c)
    base = c.start + len(c.q) - len(window)
    for j, t in enumerate(range(c.start, c.start + len(c.q))):
        near = [window[p - base] for p in range(max(t - c.width + 1, 0), t + 1)]
        visible = (t + 1) // c.ratio if c.ratio else 0
        far = range(min(visible, len(rows))) if c.chosen is None else [r for r in c.chosen[j] if r < visible]
        yield np.array(near + [rows[r] for r in far])


def spelled_out(c):
    """The formula in float64, one query and head at a time, pairs as complex numbers."""
    T, H, tail = len(c.q), len(c.sink), 2 * c.cos.shape[1]
    q = c.q.reshape(T, H, -1).astype(np.float64)
    q /= np.sqrt((q ** 2).mean(-1, keepdims=True) + EPS)
    turn = (c.cos.astype(np.float64) + 1j * c.sin)[:, None]
    q[..., -tail:] = (q[..., -tail:].copy().view(np.complex128) * turn).view(np.float64)
    out = np.zeros_like(q)
    for j, seen in enumerate(keys(c)):
        for h in range(H):
            z = seen @ q[j, h] / np.sqrt(q.shape[-1])
            m = max(z.max(), c.sink[h])
            out[j, h] = np.exp(z - m) @ seen / (np.exp(z - m).sum() + np.exp(c.sink[h] - m))
    out[..., -tail:] = (out[..., -tail:].copy().view(np.complex128) * turn.conj()).view(np.float64)
    return out.reshape(T, -1)


ROUNDED = 4e-6  # float32 sums against float64, of rows of about unit size
HALVES = 2e-3   # q and the weights in 11 bits, which prefill may do

CHUNKS = [  # tokens, start, ratio, chosen rows
    (1, 0, 0, 0), (2, 126, 0, 0), (5, 126, 0, 0),           # an empty history, a window just full, one that moves on
    (1, 0, 4, 0), (2, 254, 128, 0), (8, 300, 4, 0),         # no compressed row yet, one from the last token on, many
    (1, 300, 4, 8), (5, 14, 4, 8), (33, 20, 4, 3),          # chosen rows, more than are visible, one by one
    (1, 40000, 128, 0), (130, 70, 4, 0)]                    # keys over several threadgroups, queries over two blocks


@pytest.mark.parametrize(("tokens", "start", "ratio", "k"), CHUNKS)
def test_the_sum_over_what_each_query_sees(case, tokens, start, ratio, k, implementation):
    c = case(tokens, start, ratio, k)
    with ops.only(implementation, exact=True):
        np.testing.assert_allclose(c.run(), spelled_out(c), atol=ROUNDED)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("tokens", "start", "ratio", "k"), [(1, 3000, 4, 512), (2, 1000, 128, 0), (9, 250, 4, 16)])
def test_sizes_of_flash(case, tokens, start, ratio, k, packed, implementation):
    c = case(tokens, start, ratio, k, heads=64, size=512, packed=packed)
    np.testing.assert_allclose(c.run(), spelled_out(c), atol=ROUNDED if tokens < 9 else HALVES)


@pytest.mark.parametrize("sizes", [
    {"heads": 12, "size": 192, "width": 5}, {"heads": 1, "size": 256, "tail": 128},
    {"heads": 3, "size": 66, "tail": 2, "packed": False}])  # the last without a kernel
def test_other_models(case, sizes, implementation):
    c = case(3, 50, 4, **sizes)
    np.testing.assert_allclose(c.run(), spelled_out(c), atol=ROUNDED)


@pytest.mark.parametrize("tokens", [9, 33])
def test_prefill_in_halves(case, tokens, implementation):
    c = case(tokens, 200, 4, 16, heads=20)
    np.testing.assert_allclose(c.run(), spelled_out(c), atol=HALVES)


def test_a_query_as_small_as_eps(case, implementation):
    c = case(2, 40)
    c = c._replace(q=c.q * np.float32(1e-3))   # its mean square is EPS, so it comes to 0.7 of unit size
    np.testing.assert_allclose(c.run(), spelled_out(c), atol=ROUNDED)


@pytest.mark.parametrize("sink", [80.0, -1e30])
def test_a_sink_takes_all_or_nothing(case, sink, implementation):
    c = case(2, 150, 4)._replace(sink=np.full(4, sink, np.float32))
    np.testing.assert_allclose(c.run(), spelled_out(c), atol=ROUNDED)


@pytest.mark.parametrize("tokens", [1, 40])
def test_equal_rows_share_the_weight(case, tokens, implementation):
    c = case(tokens, 500, 4, 30, packed=False)._replace(sink=np.full(4, -1e30, np.float32))
    c.window[:] = c.rows[:] = c.rows[0]
    turned = ops.rope_tail(mx.array(np.tile(c.rows[0], (tokens, 1))), mx.array(c.cos), mx.array(c.sin), inverse=True)
    np.testing.assert_allclose(c.run().reshape(tokens, 4, -1), np.array(turned)[:, None].repeat(4, 1), atol=HALVES)


def test_scores_in_the_hundreds(case, implementation):
    c = case(5, 300, 4, 8, packed=False, scale=300.0)
    np.testing.assert_allclose(c.run(), spelled_out(c), atol=0.2)  # scores of 1000 are off by 1e-4, rows differ by 600


@pytest.mark.parametrize("tokens", [3, 12])
def test_what_no_query_sees_changes_nothing(case, tokens, implementation):
    c = case(tokens, 401, 4, 8, packed=False)
    hidden = c._replace(window=np.concatenate([np.full_like(c.window[:9], 1e4), c.window]),
                        rows=np.concatenate([c.rows, np.full_like(c.rows[:50], 1e4)]), chosen=c.chosen.copy())
    hidden.chosen[:, -1] = 140    # in place of the last choice, which is taken away from the other side
    c = c._replace(chosen=np.ascontiguousarray(c.chosen[:, :-1]))
    np.testing.assert_array_equal(hidden.run(), c.run())


@pytest.mark.parametrize("tokens", [2, 9])
def test_kernels_neither_race_nor_stray(case, tokens, emulated):
    c = case(tokens, 250, 4, 8, heads=9, size=192)
    with checking(races=True, debug=True):
        np.testing.assert_allclose(c.run(), spelled_out(c), atol=ROUNDED if tokens < 9 else HALVES)


@pytest.mark.parametrize(("tokens", "start", "ratio", "k", "groups"), [
    (1, 200, 0, 0, [(8, 1, 4), (64, 1, 1)]), (1, 9999, 4, 512, [(8, 1, 7), (64, 1, 1)]),
    (1, 1 << 20, 128, 0, [(8, 1, 16), (64, 1, 1)]), (8, 9999, 4, 512, [(8, 8, 2), (64, 8, 1)]),
    (33, 9999, 4, 512, [(4, 33, 1)])])
def test_long_histories_of_few_tokens_are_split(case, tokens, start, ratio, k, groups, emulated):
    c, seen = case(tokens, start, ratio, k, heads=64, size=512), []
    with observe(lambda launch: seen.append(launch) or [mx.zeros(*output) for output in launch.outputs]):
        c.run()
    assert [launch.groups for launch in seen] == groups


def test_shapes_that_do_not_fit_are_refused(case):
    c = case(3, 20, 4, 2)
    for wrong in ({"cos": c.cos[:2]}, {"window": c.window[1:]}, {"start": 19}, {"window": c.window[:, 1:]},
                  {"rows": c.rows[:, 1:]}, {"rows": c.rows.astype(np.int32)}, {"rows": None}, {"chosen": c.chosen[:2]}):
        with pytest.raises(ValueError, match="attention"):
            c._replace(**wrong).run()


@pytest.mark.sweep
@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 17])
def test_many_histories(case, tokens, exact, heads, emulated):
    for start, ratio, k in [(0, 4, 0), (95, 4, 12), (127, 128, 0), (128, 0, 0), (700, 4, 64), (3000, 4, 512),
                            (9000, 128, 0)]:
        c = case(tokens, start, ratio, k, heads=heads, size=512)
        with ops.only("reference"):
            expected = c.run()
        with ops.only("metal-emulated", exact=exact):
            np.testing.assert_allclose(c.run(), expected, atol=ROUNDED if exact or tokens < 9 else HALVES)
