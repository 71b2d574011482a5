import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking
from ds4mlx.ops.compress import pool

EPS = 1e-6


class Stream:
    """Tokens' products k, s [n, m w] and the rest of what a compressor needs, to run in chunks."""

    def __init__(self, rng, tokens, ratio, w=128, R=64):
        self.ratio, self.w, self.R, self.overlap = ratio, w, R, ratio == 4
        mw = 2 * w if self.overlap else w
        self.k, self.s = rng.normal(size=(2, tokens, mw)).astype(np.float32)
        self.ape, self.norm = rng.normal(size=(ratio, mw)).astype(np.float32), np.float32(1 + rng.normal(size=w) / 4)
        self.angle = rng.uniform(0, 6, (tokens // ratio, R // 2))

    def step(self, start, end, frontier, packing=None):
        groups = slice(start // self.ratio, end // self.ratio)
        cos, sin = (mx.array(f(self.angle[groups]).astype(np.float32)) for f in (np.cos, np.sin))
        return ops.compress_step(mx.array(self.k[start:end]), mx.array(self.s[start:end]), frontier, mx.array(self.ape),
                                 mx.array(self.norm), cos, sin, start, self.ratio, packing, EPS)

    def run(self, ends, packing=None):
        """The frontier after the last chunk, and all rows that the chunks up to each of `ends` gave."""
        frontier, rows, start = mx.zeros((0, 2, self.k.shape[1])), [], 0
        for end in ends:
            frontier, new = self.step(start, end, frontier, packing)
            rows += [] if new is None else [np.array(new)]
            start = end
        return np.array(frontier), np.concatenate(rows) if rows else None

    def by_definition(self):
        """All rows in float64, group by group, without rounding."""
        k, rows = self.k.astype(np.float64), []
        s = self.s + self.ape.astype(np.float64)[np.arange(len(self.k)) % self.ratio]
        for c in range(len(self.angle)):
            own, last = slice(c * self.ratio, (c + 1) * self.ratio), slice((c - 1) * self.ratio, c * self.ratio)
            values, scores = k[own, -self.w:], s[own, -self.w:]
            if self.overlap and c:
                values, scores = np.concatenate([k[last, :self.w], values]), np.concatenate([s[last, :self.w], scores])
            weight = np.exp(scores - scores.max(0))
            row = (weight * values).sum(0) / weight.sum(0)
            row *= self.norm / np.sqrt((row * row).mean() + EPS)
            turned = (row[-self.R::2] + 1j * row[1 - self.R::2]) * np.exp(1j * self.angle[c])
            row[-self.R:] = np.stack([turned.real, turned.imag], -1).reshape(-1)
            rows.append(row)
        return np.array(rows)


# Chunks of any size at any alignment: none, one or many groups completed, with and without a group before.
ENDS = {4: [[23], [1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 9, 17, 50], [8, 9, 12], [33, 166]],
        128: [[300], [1, 127, 128, 130], [5, 135, 256, 258], [128, 129]]}


def check(stream, ends):
    """Rows by the definition, and a frontier of exactly the tokens that are still needed."""
    frontier, rows = stream.run(ends)
    if rows is not None:  # float32 against float64: exponentials, sums of 128 terms, then of w squares
        np.testing.assert_allclose(rows, stream.by_definition(), rtol=5e-6, atol=5e-6)
    n = ends[-1]
    place = np.arange(max(0, n - n % stream.ratio - (4 if stream.overlap else 0)), n)
    np.testing.assert_array_equal(frontier[:, 0], stream.k[place])
    np.testing.assert_array_equal(frontier[:, 1], stream.s[place] + stream.ape[place % stream.ratio])
    assert (rows is None) == (n < stream.ratio)


@pytest.mark.parametrize("ratio, ends", [(ratio, ends) for ratio in ENDS for ends in ENDS[ratio]])
def test_rows_and_frontier_after_chunks(rng, implementation, ratio, ends):
    check(Stream(rng, ends[-1], ratio), ends)


@pytest.mark.parametrize("ratio, ends", [(4, [3, 8, 9]), (128, [129])])
def test_rows_of_flash(rng, implementation, ratio, ends):
    check(Stream(rng, ends[-1], ratio, w=512), ends)


@pytest.mark.parametrize("w, R", [(256, 64), (64, 32)])
def test_rows_of_other_widths(rng, implementation, w, R):
    check(Stream(rng, 11, 4, w, R), [6, 11])


def test_scores_far_apart_leave_one_token(rng, implementation):
    stream = Stream(rng, 128, 128)
    stream.s[77] += 1e4
    stream.s[:77] -= 1e30
    check(stream, [128])


@pytest.mark.parametrize("w", [128, 512])
def test_attention_rows_are_packed_last(rng, implementation, w):
    stream = Stream(rng, 9, 4, w)
    rows, packed = stream.run([6, 9])[1], stream.run([6, 9], "fp8")[1]
    np.testing.assert_array_equal(packed, np.array(ops.fp8_pack(mx.array(rows), 64)))


def test_indexer_rows_are_packed_last(rng, implementation):
    """One in a thousand codes may be off by one: devices add up a Hadamard transform in orders of their own."""
    stream = Stream(rng, 64, 4)
    rows, packed = (mx.array(stream.run([5, 64], packing)[1]) for packing in (None, "fp4"))
    found, expected = np.array(ops.fp4_unpack(packed, 128)), np.array(ops.fp4_unpack(ops.fp4_pack(rows), 128))
    assert (found == expected).mean() > 0.999 and np.abs(found - expected).max() <= 1


def test_no_race_and_no_undefined_behaviour(rng, emulated):
    with checking(races=True, debug=True):
        check(Stream(rng, 6, 4), [6])
        check(Stream(rng, 129, 128), [129])


@pytest.mark.sweep
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 33, 130, 300])
@pytest.mark.parametrize("ratio, start", [*((4, start) for start in range(10)),
                                          *((128, start) for start in (0, 1, 95, 127, 128, 129, 255, 256))])
def test_every_alignment(rng, emulated, ratio, start, tokens):
    stream = Stream(rng, start + tokens, ratio)
    check(stream, [start, start + tokens] if start else [tokens])


def test_a_frontier_of_another_length_is_refused(rng):
    with pytest.raises(ValueError, match="needed 5 tokens and 1 groups"):
        Stream(rng, 12, 4).step(5, 9, mx.zeros((1, 2, 256)))


def test_each_channel_has_its_own_softmax(rng):
    k, s = rng.normal(size=(2, 2, 8, 4))
    weight = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    pooled = pool(mx.array(k), mx.array(s))
    np.testing.assert_allclose(np.array(pooled), (weight * k).sum(axis=1), atol=1e-6)  # float32 against float64


def test_a_slot_with_score_minus_infinity_is_left_out(rng):
    k, s = rng.normal(size=(2, 1, 4, 4)).astype(np.float32)
    s[:, :2] = -np.inf
    k[:, :2] = 1e9
    np.testing.assert_array_equal(np.array(pool(mx.array(k), mx.array(s))),
                                  np.array(pool(mx.array(k[:, 2:]), mx.array(s[:, 2:]))))
