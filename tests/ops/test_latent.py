import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking

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


def check(args):
    q, before = args[0], len(args[6])
    qr, rows = latent(args)
    expected, new = by_definition(*args)
    np.testing.assert_allclose(qr, expected, rtol=2e-6, atol=2e-6)      # float32 against float64: sums of Q squares
    if args[7]:  # rounding has steps, so the rows before it decide: the same op's, unpacked
        _, unpacked = latent((*args[:6], np.zeros((0, args[1].shape[1]), np.float32), False, EPS))
        tail = 2 * args[4].shape[1]
        np.testing.assert_array_equal(rows[before:], np.array(ops.fp8_pack(mx.array(unpacked), tail)))
    else:
        np.testing.assert_allclose(rows[before:], new, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(rows[:before], args[6])
    assert len(qr) == len(q) and len(rows) == before + len(q)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens, before", [(1, 0), (1, 128), (2, 3), (5, 1), (8, 128), (33, 0), (130, 7)])
def test_latent_queries_and_rows_behind_the_window(rng, implementation, tokens, before, packed):
    check(case(rng, tokens, before, packed))


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_flash(rng, implementation, packed):
    check(case(rng, 2, 128, packed, D=512, Q=1024))


@pytest.mark.parametrize("D, Q, R", [(128, 96, 64), (256, 200, 64), (192, 128, 64), (70, 32, 6)])
def test_rows_of_other_shapes(rng, implementation, D, Q, R):
    """Fewer columns than threads, a row of 326 bytes, and two shapes that no kernel takes."""
    check(case(rng, 3, 4, True, D, Q, R))


def test_rows_of_zeros_and_of_huge_values_are_finite(rng, implementation):
    args = list(case(rng, 3, 0, True))
    args[1][:2] = [[0.0], [1e18]]
    args[3] *= 1e30                                                      # the rows' weights
    rows = ops.fp8_unpack(mx.array(latent(args)[1]), 128, 64)
    assert np.isfinite(np.array(rows)).all() and not np.array(rows)[0].any()


def test_a_damaged_row_stays_damaged(rng, implementation):
    args = list(case(rng, 3, 0, True))
    args[1][1, 5] = np.nan
    rows = np.array(ops.fp8_unpack(mx.array(latent(args)[1]), 128, 64))
    assert np.isnan(rows).any(axis=1).tolist() == [False, True, False]


def check_step(rng, positions, packed, width=16, **sizes):
    """Rings keep all rows but the one of the position, which is the row that `latent` makes."""
    *inputs, window, _, _ = case(rng, len(positions), len(positions) * width, packed, **sizes)
    windows = window.reshape(len(positions), width, -1)
    qr, rows = ops.latent_step(*map(mx.array, (*inputs, windows, np.array(positions, np.int32))), packed, EPS)
    alone, new = latent((*inputs, window[:0], packed, EPS))
    np.testing.assert_array_equal(np.array(qr), alone)
    windows[np.arange(len(positions)), np.array(positions) % width] = new
    np.testing.assert_array_equal(np.array(rows), windows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("positions", [[0], [15], [1 << 20], [3, 16, 31, 15, 0, 7, 8, 9, 100]])
def test_a_step_overwrites_one_place_of_each_ring(rng, positions, packed, implementation):
    check_step(rng, positions, packed)


@pytest.mark.parametrize("sizes", [{"D": 512, "Q": 1024, "width": 128}, {"width": 1}, {"D": 192, "width": 5},
                                   {"D": 70, "Q": 32, "R": 6}])     # the last without a kernel
def test_rings_of_other_shapes(rng, sizes, implementation):
    check_step(rng, [200, 3], True, **sizes)


def test_rings_for_other_sequences_are_refused(rng):
    *inputs, window, _, _ = map(mx.array, case(rng, 2, 8, True))
    for windows, positions in ((window.reshape(4, 2, -1), [1, 2]), (window.reshape(2, 4, -1), [1]),
                               (window.reshape(2, 4, -1)[..., 1:], [1, 2])):
        with pytest.raises(ValueError, match="latent_step: windows"):
            ops.latent_step(*inputs, windows, mx.array(positions), True, EPS)


@pytest.mark.sweep
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", [0, 1, 127, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 33, 130, 300])
@pytest.mark.parametrize("D, Q", [(128, 128), (512, 1024), (512, 1536)])
def test_every_length_of_chunk_and_window(rng, emulated, D, Q, tokens, before, packed):
    check(case(rng, tokens, before, packed, D, Q))


def test_no_race_and_no_undefined_behaviour(rng, emulated):
    with checking(races=True, debug=True):
        check(case(rng, 2, 3, True))
        check_step(rng, [3, 9], True, width=4)


def test_a_window_of_the_other_form_is_refused(rng):
    with pytest.raises(ValueError, match="needed rows of 194"):
        latent((*case(rng, 1, 4, packed=False)[:7], True, EPS))
