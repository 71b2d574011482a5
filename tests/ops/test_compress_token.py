"""A token of several sequences: each gets what `compress_step` gives it alone, its frontier in a ring."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking

EPS = 1e-6
PACKINGS = [None, "fp8", "fp4"]


class Compressor:
    """What is the same for all sequences, and sequences of random tokens."""

    def __init__(self, rng, ratio, tokens, sequences=1, w=128, R=64):
        self.ratio, self.m, self.w, self.R = ratio, 2 if ratio == 4 else 1, w, R
        self.k, self.s = rng.normal(size=(2, sequences, tokens, self.m * w)).astype(np.float32)
        self.ape = mx.array(rng.normal(size=(ratio, self.m * w)).astype(np.float32))
        self.norm = mx.array(1 + rng.normal(size=w).astype(np.float32) / 4)
        self.angle = rng.uniform(0, 6, (tokens // ratio + 1, R // 2))

    def tables(self, groups):
        return [mx.array(f(self.angle[groups]).astype(np.float32)) for f in (np.cos, np.sin)]

    def alone(self, b, length, packing=None):
        """Frontier and rows of sequence b after `length` tokens."""
        return ops.compress_step(*(mx.array(a[b, :length]) for a in (self.k, self.s)),
                                 mx.zeros((0, 2, self.m * self.w)), self.ape, self.norm,
                                 *self.tables(np.arange(length // self.ratio)), 0, self.ratio, packing, EPS)

    def ring(self, b, length):
        """The frontier of sequence b as a ring; places not written hold what must not be read."""
        ring = np.full((self.m * self.ratio, 2, self.m * self.w), np.nan, np.float32)
        if length:
            held = np.array(self.alone(b, length)[0])
            ring[np.arange(length - len(held), length) % len(ring)] = held
        return ring

    def token(self, positions, packing=None):
        positions = np.array(positions, np.int32)
        k, s = (mx.array(np.stack([a[b, p] for b, p in enumerate(positions)])) for a in (self.k, self.s))
        frontiers = mx.array(np.stack([self.ring(b, p) for b, p in enumerate(positions)]))
        return ops.compress_token(k, s, frontiers, self.ape, self.norm, *self.tables(positions // self.ratio),
                                  mx.array(positions), self.ratio, packing, EPS)

    def check(self, positions, packing=None):
        frontiers, rows = self.token(positions, packing)
        for b, position in enumerate(positions):
            held = np.array(self.alone(b, position + 1)[0])
            place = np.arange(position + 1 - len(held), position + 1) % (self.m * self.ratio)
            np.testing.assert_array_equal(np.array(frontiers)[b, place], held)
            expected = self.alone(b, position + 1, packing)[1][-1:] if (position + 1) % self.ratio == 0 else None
            close(rows[b:b + 1], expected, packing, self.w, self.R)


def close(row, expected, packing, w, R):
    if expected is None:
        assert not np.array(row).any()
        return
    unpack = {"fp8": lambda a: ops.fp8_unpack(a, w, R), "fp4": lambda a: ops.fp4_unpack(a, w), None: mx.array}[packing]
    found, expected = np.array(unpack(row)), np.array(unpack(expected))
    step = 1 if packing == "fp4" else 0.07 * np.abs(expected).max() if packing else 0   # one code may round otherwise
    assert (np.abs(found - expected) <= step + 5e-6).all() and (np.abs(found - expected) < 5e-6).mean() > 0.97


POSITIONS = {4: [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 90], 128: [0, 126, 127, 128, 200, 255, 256, 383]}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_each_sequence_gets_what_it_gets_alone(rng, ratio, packing, implementation):
    positions = POSITIONS[ratio]
    Compressor(rng, ratio, max(positions) + 1, len(positions)).check(positions, packing)


@pytest.mark.parametrize("ratio, positions", [(4, [3, 8, 11]), (128, [127, 129])])
def test_rows_of_flash(rng, ratio, positions, implementation):
    Compressor(rng, ratio, max(positions) + 1, len(positions), w=512).check(positions, "fp8")


@pytest.mark.parametrize("w, R", [(256, 64), (64, 32)])
def test_rows_of_other_widths(rng, w, R, implementation):
    Compressor(rng, 4, 12, 2, w, R).check([7, 11])


def test_a_sequence_of_tokens_one_by_one(rng, implementation):
    c, rows = Compressor(rng, 4, 16), []
    frontiers = mx.zeros((1, 8, 2, 256))
    for p in range(16):
        frontiers, row = ops.compress_token(mx.array(c.k[:, p]), mx.array(c.s[:, p]), frontiers, c.ape, c.norm,
                                            *c.tables([p // 4]), mx.array([p]), 4, None, EPS)
        rows += [np.array(row)] if p % 4 == 3 else []
    np.testing.assert_allclose(np.concatenate(rows), np.array(c.alone(0, 16)[1]), rtol=5e-6, atol=5e-6)


def test_no_race_and_no_undefined_behaviour(rng, emulated):
    with checking(races=True, debug=True):
        for ratio, positions in ((4, [3, 6, 0]), (128, [127, 200])):
            Compressor(rng, ratio, max(positions) + 1, len(positions)).check(positions, "fp8")


@pytest.mark.sweep
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("w", [128, 512])
@pytest.mark.parametrize("ratio", [4, 128])
def test_every_alignment(rng, ratio, w, packing, emulated):
    if packing != "fp4" or w == 128:
        places = 2 * (8 if ratio == 4 else 128)
        for first in range(0, places, 16):
            Compressor(rng, ratio, places + 1, 16, w).check(range(first, first + 16), packing)


def test_shapes_that_do_not_fit_are_refused(rng):
    c = Compressor(rng, 4, 8)
    for frontiers, positions in (((1, 4, 2, 256), [5]), ((2, 8, 2, 256), [5]), ((1, 8, 2, 256), [5, 6])):
        with pytest.raises(ValueError, match="compress_token: frontiers"):
            ops.compress_token(mx.array(c.k[:, 5]), mx.array(c.s[:, 5]), mx.zeros(frontiers), c.ape, c.norm,
                               *c.tables([1]), mx.array(positions), 4, None, EPS)
