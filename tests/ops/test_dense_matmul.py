import sys

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.metal_kernels.emulator import checking, counting
from ds4mlx.ops.dense_matmul import product_decoded, reference

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"]
FLOAT = 2e-5  # float32 sums of 512 products in another order, relative to the largest result
HALF = 1e-3   # factors rounded to 11 bits: 2^-11 each


def assert_near(found, expected, tolerance=FLOAT):
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=tolerance * np.abs(expected).max())


def case(random_blocks, rng, tokens, kind, n, k):
    """Vectors, a matrix, and their product in float64."""
    raw, x = random_blocks(kind, n, k), rng.normal(size=(tokens, k)).astype(np.float32)
    return mx.array(x), ops.Blocks(mx.array(raw), kind), x.astype(np.float64) @ dequantize(raw, kind).T


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("tokens", [1, 8, 33])  # decode, a batch of drafts, prefill
def test_product_with_blocks_is_the_product_with_their_weights(kind, tokens, implementation, random_blocks, rng):
    x, w, expected = case(random_blocks, rng, tokens, kind, 70, 512)
    assert_near(ops.dense_matmul(x, w), expected, HALF if "metal" in implementation and tokens > 8 else FLOAT)


@pytest.mark.parametrize("tokens", [3, 9])
def test_every_kind_has_kernels_for_decode_and_prefill(tokens, emulated, random_blocks, rng):
    x, raws = rng.normal(size=(tokens, 512)).astype(np.float32), [random_blocks(kind, 5, 512) for kind in KINDS]
    ys = ops.dense_matmuls(mx.array(x), [ops.Blocks(mx.array(r), kind) for r, kind in zip(raws, KINDS)])
    for y, raw, kind in zip(ys, raws, KINDS, strict=True):
        assert_near(y, x.astype(np.float64) @ dequantize(raw, kind).T, HALF if tokens > 8 else FLOAT)


@pytest.mark.parametrize("tokens", [2, 9])
def test_matrices_of_different_sizes_share_an_input(tokens, implementation, random_blocks, rng):
    shapes = [("Q8_0", 40), ("F16", 13), ("Q4_K", 9), ("Q8_0", 1)]
    raws, x = [random_blocks(kind, n, 256) for kind, n in shapes], rng.normal(size=(tokens, 256)).astype(np.float32)
    ys = ops.dense_matmuls(mx.array(x), [ops.Blocks(mx.array(r), kind) for r, (kind, _) in zip(raws, shapes)])
    for y, raw, (kind, _) in zip(ys, raws, shapes, strict=True):
        assert_near(y, x.astype(np.float64) @ dequantize(raw, kind).T, HALF if tokens > 8 else FLOAT)


@pytest.mark.parametrize("tokens", [5, 130])  # no multiple of what a lane or a tile holds
def test_quality_rounds_no_factor_to_half(tokens, random_blocks, rng):
    x, w, expected = case(random_blocks, rng, tokens, "Q8_0", 67, 96)
    with ops.only("metal-emulated", exact=True):
        assert_near(ops.dense_matmul(x, w), expected)


def test_activations_past_what_half_holds_are_clamped_in_prefill(emulated, random_blocks, rng):
    x, w, expected = case(random_blocks, rng, 9, "F32", 70, 64)
    large = np.array(x)
    large[1, 3:5], large[2, 6], large[3, 9] = [3e38, -7e4], np.inf, np.nan
    y, clamped = (np.array(ops.dense_matmul(mx.array(v), w)) for v in (large, np.clip(large, -65504, 65504)))
    np.testing.assert_array_equal(y[1], clamped[1])
    assert np.isinf(y[2]).all() and np.isnan(y[3]).all()
    assert_near(y[4:], expected[4:], HALF)


@pytest.mark.parametrize("tokens", [4, 10])
def test_groups_are_consecutive_blocks_of_rows(tokens, implementation, random_blocks, rng):
    raw, x = random_blocks("Q8_0", 6, 64), rng.normal(size=(tokens, 2, 64)).astype(np.float32)
    w = dequantize(raw, "Q8_0").reshape(2, 3, 64)
    y = ops.dense_matmul(mx.array(x.reshape(tokens, 128)), ops.Blocks(mx.array(raw), "Q8_0"), groups=2)
    assert_near(y, np.einsum("tgk,gnk->tgn", x, w).reshape(tokens, 6), HALF if tokens > 8 else FLOAT)


@pytest.mark.parametrize("k", [2048, 4096])
def test_long_rows_are_split_over_simdgroups(k, random_blocks, rng):
    x, w, expected = case(random_blocks, rng, 1, "Q8_0", 11, k)
    with ops.only("metal-emulated"), checking(races=True):
        assert_near(ops.dense_matmul(x, w), expected)


@pytest.mark.parametrize("tokens", [3, 9])
def test_kernels_neither_race_nor_read_past_an_end(tokens, emulated, random_blocks, rng):
    x, w, _ = case(random_blocks, rng, tokens, "IQ2_XXS", 5, 512)
    with checking(races=True, debug=True):
        mx.eval(ops.dense_matmul(x, w))


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "Q4_K"])
def test_decode_reads_every_weight_once(kind, emulated, random_blocks, rng):
    x, w, _ = case(random_blocks, rng, 4, kind, 64, 4096)
    with counting() as launches:
        y = ops.dense_matmul(x, w)
    (launch,) = launches
    assert launch.buffers["w0"].reads.group_bytes == w.raw.nbytes  # whole rows are whole sectors at this width
    assert launch.read_bytes + launch.written_bytes <= 1.001 * (w.raw.nbytes + x.nbytes + y.nbytes)  # and a count


@pytest.mark.sweep
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 33, 64, 130])
@pytest.mark.parametrize("n, k", [(1, 256), (67, 1024), (130, 2304)])
def test_sweep_of_tokens_sizes_and_kinds(tokens, n, k, exact, random_blocks, rng):
    x, raws = rng.normal(size=(tokens, k)).astype(np.float32), [random_blocks(kind, n, k) for kind in KINDS]
    with ops.only("metal-emulated", exact=exact):
        ys = ops.dense_matmuls(mx.array(x), [ops.Blocks(mx.array(r), kind) for r, kind in zip(raws, KINDS)])
    for y, raw, kind in zip(ys, raws, KINDS, strict=True):
        assert_near(y, x.astype(np.float64) @ dequantize(raw, kind).T, FLOAT if exact or tokens <= 8 else HALF)


def test_rows_that_are_not_whole_runs_fall_back_to_the_reference(implementation, random_blocks, rng):
    x, w, expected = case(random_blocks, rng, 3, "F16", 7, 10)
    assert_near(ops.dense_matmul(x, w), expected)


def test_a_matrix_larger_than_a_slab(random_blocks, rng, monkeypatch):
    monkeypatch.setattr(sys.modules["ds4mlx.ops.dense_matmul"], "SLAB_WEIGHTS", 1024)
    x, w, expected = case(random_blocks, rng, 2, "Q8_0", 11, 256)
    with ops.only("reference"):
        assert_near(ops.dense_matmul(x, w), expected)


def test_groups_decoded_and_multiplied_at_once_are_the_same(random_blocks, rng):
    w = ops.Blocks(mx.array(random_blocks("Q8_0", 12, 64)), "Q8_0")
    x = mx.array(rng.normal(size=(5, 3 * 64)).astype(np.float32))
    assert_near(product_decoded(x, w, 3), np.array(reference(x, w, 3)))


def test_groups_that_do_not_divide_the_rows_are_refused(random_blocks):
    with pytest.raises(ValueError, match="7 rows in 2 groups"):
        ops.dense_matmul(mx.zeros((1, 64)), ops.Blocks(mx.array(random_blocks("Q8_0", 7, 32)), "Q8_0"), groups=2)
