import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops


@pytest.fixture
def known(units):
    streams = mx.array(units["hc.streams"])
    mix = mx.fast.rms_norm(streams.reshape(32, -1), None, 1e-6) @ mx.array(units["hc.fn"]).T
    return streams, mix, mx.array(units["hc.scale"]), mx.array(units["hc.base"])


def test_known_answer_of_an_independent_implementation(known, units):
    x, post, m = ops.hyper_pre(*known, iterations=20, eps=1e-6)
    for found, name in ((x, "hc.collapsed"), (post, "hc.post"), (m, "hc.comb")):
        np.testing.assert_allclose(np.array(found), units[name], atol=2e-6)  # float32 in another order


@pytest.mark.parametrize("iterations", [19, 21])
def test_the_known_answer_tells_one_sinkhorn_round_more_or_less(known, units, iterations):
    _, _, m = ops.hyper_pre(*known, iterations=iterations, eps=1e-6)
    assert np.abs(np.array(m) - units["hc.comb"]).max() > 1e-4


def test_the_matrix_goes_from_source_row_to_destination_column(rng):
    y, streams, post, m = (rng.normal(size=s).astype(np.float32) for s in ((2, 8), (2, 4, 8), (2, 4), (2, 4, 4)))
    expected = post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", m, streams)
    np.testing.assert_allclose(np.array(ops.hyper_post(*map(mx.array, (y, streams, post, m)))), expected, atol=1e-5)


def blocks(fn):
    """fn [M, N D] as its file holds it."""
    return ops.Blocks(mx.array(fn.view(np.uint8)), "F16" if fn.dtype == np.float16 else "F32")


def entered(streams, fn, scale, base, update=None, norm=None, iterations=20):
    """Both halves of the way into a half layer: streams', x, post, m as NumPy arrays."""
    norm = np.ones(streams.shape[-1], np.float32) if norm is None else norm
    after, sums = ops.hyper_mix(mx.array(streams), blocks(fn), None if update is None else tuple(map(mx.array, update)))
    x, post, m = ops.hyper_enter(after, sums, *map(mx.array, (scale, base, norm)), iterations, 1e-6, 1e-6)
    return [np.array(a) for a in (after, x, post, m)]


def test_the_way_in_gives_the_known_answer(units, implementation):
    streams, fn, scale, base = (units[f"hc.{name}"] for name in ("streams", "fn", "scale", "base"))
    _, x, post, m = entered(streams, fn, scale, base)
    collapsed = units["hc.collapsed"]
    rms = np.sqrt((collapsed.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6)
    for found, expected in ((x * rms, collapsed), (post, units["hc.post"]), (m, units["hc.comb"])):
        np.testing.assert_allclose(found, expected, atol=2e-6)  # float32 in another order
