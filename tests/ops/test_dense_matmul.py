import sys

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize

TOLERANCE = 2e-5  # float32 sums of 512 products in another order, relative to the largest result


def assert_near(found, expected):
    np.testing.assert_allclose(np.array(found), expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("tokens", [1, 8, 33])  # decode, a batch of drafts, prefill
def test_product_with_blocks_is_the_product_with_their_weights(kind, tokens, implementation, random_blocks, rng):
    raw, x = random_blocks(kind, 70, 512), rng.normal(size=(tokens, 512)).astype(np.float32)
    y = ops.dense_matmul(mx.array(x), ops.Blocks(mx.array(raw), kind))
    assert_near(y, x.astype(np.float64) @ dequantize(raw, kind).T.astype(np.float64))


def test_groups_are_consecutive_blocks_of_rows(implementation, random_blocks, rng):
    raw, x = random_blocks("Q8_0", 6, 64), rng.normal(size=(4, 2, 64)).astype(np.float32)
    w = dequantize(raw, "Q8_0").reshape(2, 3, 64)
    y = ops.dense_matmul(mx.array(x), ops.Blocks(mx.array(raw), "Q8_0"), groups=2)
    assert_near(y, np.einsum("tgk,gnk->tgn", x, w))


def test_a_matrix_larger_than_a_slab(implementation, random_blocks, rng, monkeypatch):
    for module in ("native", "dense_matmul"):
        monkeypatch.setattr(sys.modules[f"ds4mlx.ops.{module}"], "SLAB_WEIGHTS", 1024)
    raw, x = random_blocks("Q8_0", 11, 256), rng.normal(size=(2, 256)).astype(np.float32)
    assert_near(ops.dense_matmul(mx.array(x), ops.Blocks(mx.array(raw), "Q8_0")), x @ dequantize(raw, "Q8_0").T)


def test_groups_that_do_not_divide_the_rows_are_refused(random_blocks):
    with pytest.raises(ValueError, match="7 rows in 2 groups"):
        ops.dense_matmul(mx.zeros((1, 2, 32)), ops.Blocks(mx.array(random_blocks("Q8_0", 7, 32)), "Q8_0"), groups=2)


@pytest.mark.parametrize("tokens", [1, 9])
def test_several_matrices_of_different_kinds_share_an_input(tokens, implementation, random_blocks, rng):
    shapes = [("Q8_0", 40), ("F16", 13), ("Q4_K", 9), ("Q8_0", 1)]
    raws, x = [random_blocks(kind, n, 256) for kind, n in shapes], rng.normal(size=(tokens, 256)).astype(np.float32)
    ys = ops.dense_matmuls(mx.array(x), [ops.Blocks(mx.array(r), kind) for r, (kind, _) in zip(raws, shapes)])
    for y, raw, (kind, _) in zip(ys, raws, shapes, strict=True):
        assert_near(y, x.astype(np.float64) @ dequantize(raw, kind).T)
