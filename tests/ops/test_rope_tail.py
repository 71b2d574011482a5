import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops


def tables(angle):
    return mx.array(np.cos(angle).astype(np.float32)), mx.array(np.sin(angle).astype(np.float32))


def test_neighbouring_channels_of_the_tail_turn_as_complex_numbers(rng):
    x, angle = rng.normal(size=(5, 3, 12)).astype(np.float32), rng.uniform(0, 6, (5, 4))
    turned = (x[..., 4::2] + 1j * x[..., 5::2]) * np.exp(1j * angle)[:, None]
    y = np.array(ops.rope_tail(mx.array(x), *tables(angle)))
    np.testing.assert_array_equal(y[..., :4], x[..., :4])
    np.testing.assert_allclose(y[..., 4::2] + 1j * y[..., 5::2], turned, atol=1e-6)


def test_the_inverse_undoes_it(rng):
    x, turn = mx.array(rng.normal(size=(5, 12)).astype(np.float32)), tables(rng.uniform(0, 6, (5, 4)))
    assert mx.allclose(ops.rope_tail(ops.rope_tail(x, *turn), *turn, inverse=True), x, atol=1e-6)


def test_tables_for_another_number_of_tokens_are_refused():
    with pytest.raises(ValueError, match="rope_tail"):
        ops.rope_tail(mx.zeros((3, 8)), mx.zeros((2, 4)), mx.zeros((2, 4)))
