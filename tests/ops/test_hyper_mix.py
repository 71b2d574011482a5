import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking
from ds4mlx.ops.hyper_mix import post_reference, pre_reference


@pytest.fixture
def known(units):
    streams = mx.array(units["hc.streams"])
    mix = mx.fast.rms_norm(streams.reshape(32, -1), None, 1e-6) @ mx.array(units["hc.fn"]).T
    return streams, mix, mx.array(units["hc.scale"]), mx.array(units["hc.base"])


def test_known_answer_of_an_independent_implementation(known, units):
    x, post, m = pre_reference(*known, iterations=20, eps=1e-6)
    for found, name in ((x, "hc.collapsed"), (post, "hc.post"), (m, "hc.comb")):
        np.testing.assert_allclose(np.array(found), units[name], atol=2e-6)  # float32 in another order


@pytest.mark.parametrize("iterations", [19, 21])
def test_the_known_answer_tells_one_sinkhorn_round_more_or_less(known, units, iterations):
    _, _, m = pre_reference(*known, iterations=iterations, eps=1e-6)
    assert np.abs(np.array(m) - units["hc.comb"]).max() > 1e-4


def test_the_matrix_goes_from_source_row_to_destination_column(rng):
    y, streams, post, m = (rng.normal(size=s).astype(np.float32) for s in ((2, 8), (2, 4, 8), (2, 4), (2, 4, 4)))
    expected = post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", m, streams)
    np.testing.assert_allclose(np.array(post_reference(*map(mx.array, (y, streams, post, m)))), expected, atol=1e-5)


def blocks(fn):
    """fn [M, N D] as its file holds it."""
    return ops.Blocks(mx.array(fn.view(np.uint8)), "F16" if fn.dtype == np.float16 else "F32")


def entered(streams, fn, scale, base, norm, update=None):
    """The way into a half layer: streams', x, post, m."""
    after, sums = ops.hyper_mix(mx.array(streams), blocks(fn), None if update is None else tuple(map(mx.array, update)))
    x, post, m = ops.hyper_enter(after, sums, *map(mx.array, (scale, base, norm)), 20, 1e-6, 1e-6)
    return [np.array(a) for a in (after, x, post, m)]


def mixed_back(streams, y, post, m):
    return post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", m, streams)


def normal(x):
    return x / np.sqrt((x ** 2).mean(axis=-1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def in_float64(streams, fn, scale, base, norm, update=None):
    """What `entered` gives, from the formulas."""
    h = streams if update is None else mixed_back(*(a.astype(np.float64) for a in (streams, *update)))
    h = h.astype(np.float64)
    mix = normal(h.reshape(len(h), -1)) @ fn.astype(np.float64).T
    pre, post = sigmoid(mix[:, :4] * scale[0] + base[:4]) + 1e-6, 2 * sigmoid(mix[:, 4:8] * scale[1] + base[4:8])
    m = np.exp(mix[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4)
    m = m / m.sum(axis=2, keepdims=True) + 1e-6
    for step in range(39):
        m = m / (m.sum(axis=1 if step % 2 == 0 else 2, keepdims=True) + 1e-6)
    return h, normal(np.einsum("tn,tnd->td", pre, h)) * norm, post, m


@pytest.fixture
def half_layer(rng):
    """half_layer(T, D, rows of fn, its type): streams, fn, scale, base, norm and an update, all of about unit size."""
    def make(T, D, rows=24, dtype=np.float32):
        shapes = ((T, 4, D), (rows, 4 * D), (3,), (rows,), (D,), (T, D), (T, 4), (T, 4, 4))
        streams, fn, scale, base, norm, *update = (rng.normal(size=s).astype(np.float32) for s in shapes)
        return streams, (fn / np.sqrt(4 * D)).astype(dtype), scale, base, norm, update
    return make


def test_the_way_in_gives_the_known_answer(units, implementation):
    streams, fn, scale, base = (units[f"hc.{name}"] for name in ("streams", "fn", "scale", "base"))
    collapsed = units["hc.collapsed"].astype(np.float64)
    _, x, post, m = entered(streams, fn, scale, base, norm=np.ones(16, np.float32))
    rms = np.sqrt((collapsed ** 2).mean(axis=-1, keepdims=True) + 1e-6)
    for found, expected in ((x * rms, collapsed), (post, units["hc.post"]), (m, units["hc.comb"])):
        np.testing.assert_allclose(found, expected, atol=2e-6)  # float32 in another order


@pytest.mark.parametrize("tokens, D, dtype", [(1, 300, np.float16), (2, 70, np.float32), (5, 300, np.float16),
                                              (33, 70, np.float32), (130, 70, np.float32),
                                              pytest.param(35, 4096, np.float16, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("updated", [False, True])
def test_a_half_layer_is_entered_as_the_formulas_say(tokens, D, dtype, updated, half_layer, implementation):
    *case, update = half_layer(tokens, D, dtype=dtype)
    update = update if updated else None
    for found, expected in zip(entered(*case, update), in_float64(*case, update), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)  # float32 sums over 4 D numbers


@pytest.mark.parametrize("tokens, D", [(1, 70), (3, 300)])
def test_the_streams_are_left_as_the_formula_says(tokens, D, half_layer, implementation):
    streams, fn, _, base, norm, update = half_layer(tokens, D, rows=4)
    after, sums = ops.hyper_mix(mx.array(streams), blocks(fn), tuple(map(mx.array, update)))
    x = ops.hyper_leave(after, sums, mx.array([0.7]), mx.array(base), mx.array(norm), 1e-6, 1e-6)
    h = mixed_back(*(a.astype(np.float64) for a in (streams, *update)))
    pre = sigmoid(normal(h.reshape(tokens, -1)) @ fn.astype(np.float64).T * 0.7 + base) + 1e-6
    expected = normal(np.einsum("tn,tnd->td", pre, h)) * norm
    np.testing.assert_allclose(np.array(x), expected, rtol=1e-5, atol=2e-5)  # float32 sums over 4 D numbers


@pytest.mark.parametrize("tokens", [1, 35])
def test_weights_may_be_the_upper_halves_of_floats(tokens, half_layer, implementation):
    streams, fn, *_ = half_layer(tokens, 70)
    short = ops.Blocks(mx.array(np.ascontiguousarray(fn.view(np.uint16)[:, 1::2]).view(np.uint8)), "BF16")
    same = blocks((fn.view(np.uint32) & 0xFFFF0000).view(np.float32))
    found, expected = (np.array(ops.hyper_mix(mx.array(streams), w)[1]) for w in (short, same))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)  # float32 sums of 280 numbers


@pytest.mark.parametrize("streams", [3, 4])  # the first have no kernel
def test_large_streams_are_multiplied_in_float32(streams, rng, implementation):
    h, fn = rng.normal(0, 1e5, (33, streams, 64)).astype(np.float32), rng.normal(size=(5, streams * 64))
    fn = fn.astype(np.float32)
    sums = np.array(ops.hyper_mix(mx.array(h), blocks(fn))[1]).sum(axis=1)
    expected = h.reshape(33, -1).astype(np.float64) @ fn.astype(np.float64).T
    np.testing.assert_allclose(sums[:, :-1], expected, atol=1e-6 * 1e5 * 64)  # of sums of up to 256 numbers near 1e5


def test_silent_streams_stay_finite(half_layer, implementation):
    streams, *rest, _ = half_layer(2, 70)
    _, x, _, m = entered(0 * streams, *rest)
    assert not x.any()
    np.testing.assert_allclose(m.sum(axis=1), 1, atol=1e-4)  # columns are last, with an epsilon of 1e-6 in the divisor


def test_weights_of_another_type_or_width_are_refused(half_layer):
    streams, fn, *_ = half_layer(1, 70)
    for wrong in (ops.Blocks(blocks(fn).raw, "Q8_0"), blocks(fn[:, :-4].copy())):
        with pytest.raises(ValueError, match="need F16 or F32 or BF16, 280 a row"):
            ops.hyper_mix(mx.array(streams), wrong)


def test_the_kernels_give_the_same_in_any_order_of_threads(half_layer, emulated):
    streams, fn, scale, base, norm, update = half_layer(3, 300)
    with checking(races=True, debug=True):
        entered(streams, fn, scale, base, norm, update)
        rest = mx.zeros((3, 5, 5)), mx.array([1.0]), mx.array(base[:4]), mx.array(norm)
        mx.eval(ops.hyper_leave(mx.array(streams), *rest, 1e-6, 1e-6))
