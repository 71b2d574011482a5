import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops

EPS = 1e-6


def case(rng, tokens, before, packed, D=128, Q=128, R=64):
    """The arguments of `latent` as NumPy arrays and floats, in order."""
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)
    angle = rng.uniform(0, 6, (tokens, R // 2))
    window = rng.integers(0, 256, (before, ops.pack_bytes(D, R)), np.uint8) if packed else normal(before, D)
    return (normal(tokens, Q), normal(tokens, D), 1 + normal(Q) / 4, 1 + normal(D) / 4,
            np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), window, packed, EPS)


def latent(args):
    return [np.array(a) for a in ops.latent(*(mx.array(a) if isinstance(a, np.ndarray) else a for a in args))]


def by_definition(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    """float64, without rounding."""
    def rms(x, w):
        x = x.astype(np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
    row, tail = rms(kv, kv_norm), 2 * cos.shape[1]
    turned = (row[:, -tail::2] + 1j * row[:, 1 - tail::2]) * (cos + 1j * sin)
    row[:, -tail:] = np.stack([turned.real, turned.imag], -1).reshape(len(row), tail)
    return rms(q, q_norm), row


def test_latent_queries_and_rows(rng):
    args = case(rng, tokens=5, before=3, packed=False)
    qr, rows = latent(args)
    expected_qr, new = by_definition(*args)
    np.testing.assert_allclose(qr, expected_qr, atol=2e-6)          # float32 against float64
    np.testing.assert_allclose(rows[3:], new, atol=2e-6)
    np.testing.assert_array_equal(rows[:3], args[6])


def test_packed_rows_are_the_packed_form_of_the_others(rng):
    args = case(rng, tokens=5, before=3, packed=True)
    _, packed = latent(args)
    _, rows = latent((*args[:6], np.zeros((0, 128), np.float32), False, EPS))
    np.testing.assert_array_equal(packed, np.concatenate([args[6], np.array(ops.fp8_pack(mx.array(rows), 64))]))


def test_a_window_of_the_other_form_is_refused(rng):
    with pytest.raises(ValueError, match="needed rows of 194"):
        latent((*case(rng, 1, 4, packed=False)[:7], True, EPS))
