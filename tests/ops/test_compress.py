import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops

EPS = 1e-6


class Stream:
    """Tokens' products k, s [n, m w] and the rest of what a compressor needs, R = w / 2; two orders to run it in."""

    def __init__(self, rng, tokens, ratio, w=128):
        self.ratio, self.w, self.overlap = ratio, w, ratio == 4
        mw = 2 * w if self.overlap else w
        self.k, self.s = rng.normal(size=(2, tokens, mw)).astype(np.float32)
        self.ape, self.norm = rng.normal(size=(ratio, mw)).astype(np.float32), np.float32(1 + rng.normal(size=w) / 4)
        self.angle = rng.uniform(0, 6, (tokens // ratio, w // 4))

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
            half = self.w // 2
            turned = (row[half::2] + 1j * row[half + 1::2]) * np.exp(1j * self.angle[c])
            row[half:] = np.stack([turned.real, turned.imag], -1).reshape(-1)
            rows.append(row)
        return np.array(rows)


@pytest.mark.parametrize("ratio, tokens", [(4, 23), (128, 300)])
def test_rows_of_a_chunk(rng, ratio, tokens):
    stream = Stream(rng, tokens, ratio)
    _, rows = stream.run([tokens])
    np.testing.assert_allclose(rows, stream.by_definition(), atol=5e-6)   # float32 against float64, 128 exponentials


@pytest.mark.parametrize("ratio, ends", [(4, [1, 2, 3, 4, 5, 6, 11, 12, 20, 23]),
                                         (128, [1, 127, 128, 130, 255, 256, 300])])
def test_chunks_of_any_size_give_the_same_rows_and_frontier(rng, ratio, ends):
    stream = Stream(rng, ends[-1], ratio)
    for found, expected in zip(stream.run(ends), stream.run(ends[-1:]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)            # MLX sums an axis in an order of its own


@pytest.mark.parametrize("tokens, held", [(3, 3), (4, 4), (6, 6), (8, 4), (11, 7)])
def test_a_frontier_of_ratio_4_holds_the_last_group_and_the_open_one(rng, tokens, held):
    stream = Stream(rng, tokens, 4)
    frontier, _ = stream.run([tokens])
    place = np.arange(tokens - held, tokens)
    np.testing.assert_array_equal(frontier[:, 0], stream.k[place])
    np.testing.assert_array_equal(frontier[:, 1], stream.s[place] + stream.ape[place % 4])


@pytest.mark.parametrize("tokens, held", [(1, 1), (127, 127), (128, 0), (130, 2)])
def test_a_frontier_of_ratio_128_holds_the_open_group(rng, tokens, held):
    stream = Stream(rng, tokens, 128)
    frontier, rows = stream.run([tokens])
    assert frontier.shape == (held, 2, 128) and (rows is None) == (tokens < 128)


@pytest.mark.parametrize("packing, unpack", [("fp8", lambda p: ops.fp8_unpack(p, 128, 64)),
                                             ("fp4", lambda p: ops.fp4_unpack(p, 128))])
def test_rows_are_packed_last(rng, packing, unpack):
    stream = Stream(rng, 8, 4)
    _, rows = stream.run([8])
    _, packed = stream.run([8], packing)
    expected = ops.fp8_pack(mx.array(rows), 64) if packing == "fp8" else ops.fp4_pack(mx.array(rows))
    assert mx.array_equal(unpack(mx.array(packed)), unpack(expected))


def test_a_frontier_of_another_length_is_refused(rng):
    with pytest.raises(ValueError, match="needed 5 tokens and 1 groups"):
        Stream(rng, 12, 4).step(5, 9, mx.zeros((1, 2, 256)))


def test_each_channel_has_its_own_softmax(rng):
    k, s = rng.normal(size=(2, 2, 8, 4))
    weight = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    pooled = ops.compress(mx.array(k), mx.array(s))
    np.testing.assert_allclose(np.array(pooled), (weight * k).sum(axis=1), atol=1e-6)  # float32 against float64


def test_a_slot_with_score_minus_infinity_is_left_out(rng):
    k, s = rng.normal(size=(2, 1, 4, 4)).astype(np.float32)
    s[:, :2] = -np.inf
    k[:, :2] = 1e9
    np.testing.assert_array_equal(np.array(ops.compress(mx.array(k), mx.array(s))),
                                  np.array(ops.compress(mx.array(k[:, 2:]), mx.array(s[:, 2:]))))
