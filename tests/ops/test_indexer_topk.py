import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking
from ds4mlx.ops import kv_round

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALE = (64 * 128) ** -0.5


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def fp4_values(packed):
    """float64 from [..., 17 n] bytes: 16 n pairs of codes, the first low, then n exponents."""
    codes, exponents = np.split(packed, [packed.shape[-1] * 16 // 17], axis=-1)
    values = E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*packed.shape[:-1], -1, 32)
    return (values * 2.0 ** (exponents.astype(int) - 127)[..., None]).reshape(*packed.shape[:-1], -1)


def vectors(rng, packed, *shape, spread=2):
    """Random rows or queries: what the op takes, and the same as float64."""
    if not packed:
        return mx.array(v := normal(rng, *shape)), v.astype(np.float64)
    *count, width = shape
    codes = rng.integers(0, 256, (*count, width // 2), np.uint8)
    exponents = rng.integers(127 - spread, 128, (*count, width // 32), np.uint8)
    held = np.concatenate([codes, exponents], axis=-1)
    return mx.array(held), fp4_values(held)


def check_scores(rng, tokens, heads, width, count, packed, spread=2):
    q, exact_q = vectors(rng, packed, tokens, heads, width, spread=spread)
    rows, exact_rows = vectors(rng, packed, count, width, spread=spread)
    weight = normal(rng, tokens, heads)                                        # of both signs
    dots = np.einsum("thw,cw->thc", exact_q, exact_rows)
    expected = SCALE * np.einsum("th,thc->tc", weight.astype(np.float64), np.maximum(dots, 0))
    got = np.array(ops.index_scores(q, mx.array(weight), rows, SCALE))
    # float32 sums of at most heads * width products, in any order: a few ulps of the largest
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


def brute_force(scores, start, ratio, k):
    """By (seen first, higher score first, lower index first)."""
    chosen = []
    for t, row in enumerate(scores.tolist()):
        seen = (start + t + 1) // ratio
        order = sorted(range(len(row)), key=lambda c: (c >= seen, -row[c] if c < seen else 0, c))
        chosen.append(sorted(order[:k]))
    return np.array(chosen)


def check_selection(scores, k, start=None, ratio=4):
    """Without a start, the first query sees all rows."""
    start = ratio * scores.shape[1] if start is None else start
    positions = mx.array(np.arange(start, start + len(scores), dtype=np.int32))
    got = np.array(ops.select_rows(mx.array(scores), positions, ratio, k))
    np.testing.assert_array_equal(got, brute_force(scores, start, ratio, k))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33, 130])
def test_scores_weigh_positive_dots_only(tokens, packed, rng, implementation):
    check_scores(rng, tokens, 8, 128, 67, packed)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_64_heads_in_half_and_in_float_tiles(exact, packed, rng):
    with ops.only("metal-emulated", exact=exact):
        check_scores(rng, 1, 64, 128, 130, packed)


def test_heads_and_rows_need_not_fill_a_tile(rng, implementation):
    check_scores(rng, 1, 12, 128, 1, packed=True)


@pytest.mark.parametrize("width", [8, 40, 32, 96])
def test_vectors_of_other_widths(width, rng, implementation):
    check_scores(rng, 3, 4, width, 9, packed=width == 32)  # 17 bytes: no kernel loads two at a time from there


def test_blocks_of_very_different_size_keep_their_products(rng, implementation):
    check_scores(rng, 2, 8, 128, 40, packed=True, spread=20)


def test_vectors_of_zeros_score_zero(implementation):
    nothing = kv_round.fp4_pack(mx.zeros((1, 8, 128)))
    assert not np.array(ops.index_scores(nothing, mx.ones((1, 8)), nothing[0], 1.0)).any()


def test_queries_and_rows_are_held_alike():
    with pytest.raises(ValueError, match="queries .* rows"):
        ops.index_scores(mx.zeros((1, 2, 68)), mx.zeros((1, 2)), mx.zeros((3, 68), mx.uint8))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("most", [1, 31, 33, 200])
def test_a_step_scores_each_query_against_its_own_pages(most, packed, rng, implementation):
    sequences, page_rows = 5, 32
    q, _ = vectors(rng, packed, sequences, 8, 128)
    pool, _ = vectors(rng, packed, 50 * page_rows, 128)
    pages = rng.integers(0, 50, (sequences, 9)).astype(np.int32)
    weight = mx.array(normal(rng, sequences, 8))
    got = ops.index_scores_step(q, weight, ops.Paged(pool, mx.array(pages), page_rows), most, SCALE)
    assert got.shape == (sequences, most)
    for b in range(sequences):
        own = (pages[b, :, None] * page_rows + np.arange(page_rows)).reshape(-1)[:most]
        alone = ops.index_scores(q[b:b + 1], weight[b:b + 1], pool[mx.array(own)], SCALE)
        np.testing.assert_allclose(np.array(got[b]), np.array(alone[0]), rtol=1e-5, atol=1e-5)  # sums in another order


def test_pages_that_part_a_tile(rng, implementation):
    q, pool = mx.array(normal(rng, 1, 8, 64)), mx.array(normal(rng, 30, 64))
    got = ops.index_scores_step(q, mx.ones((1, 8)), ops.Paged(pool, mx.array([[2, 0]]), 10), 17, SCALE)
    alone = ops.index_scores(q, mx.ones((1, 8)), mx.concatenate([pool[20:], pool[:7]]), SCALE)
    np.testing.assert_allclose(np.array(got), np.array(alone), rtol=1e-5, atol=1e-5)


def test_more_rows_than_a_page_table_holds_are_refused():
    paged = ops.Paged(mx.zeros((64, 128)), mx.zeros((2, 3), mx.int32), 16)
    for sequences, most in ((2, 49), (3, 10), (2, 0)):
        with pytest.raises(ValueError, match="index_scores_step"):
            ops.index_scores_step(mx.zeros((sequences, 8, 128)), mx.zeros((sequences, 8)), paged, most)


def turned(q, angle):
    """float64: the last channels of q [T, H, W] as complex numbers, times e^(i angle) [T, P]."""
    plain = q.shape[-1] - 2 * angle.shape[1]
    tail = (q[..., plain::2] + 1j * q[..., plain + 1::2]) * np.exp(1j * angle.astype(np.float64))[:, None]
    tail = np.stack([tail.real, tail.imag], axis=-1).reshape(*q.shape[:2], -1)
    return np.concatenate([q[..., :plain], tail], axis=-1)


def index_queries(q, angle, packed):
    angle = mx.array(angle)
    return np.array(ops.index_queries(mx.array(q), mx.cos(angle), mx.sin(angle), packed))


@pytest.mark.parametrize("width", [8, 64, 128])
def test_the_tail_of_a_query_is_turned(width, rng, implementation):
    q, angle = normal(rng, 2, 3, width), normal(rng, 2, width // 4)
    np.testing.assert_allclose(index_queries(q, angle, packed=False), turned(q, angle), atol=1e-6)  # ulps of |q| < 6


@pytest.mark.parametrize("tokens, width", [(1, 128), (33, 128), (3, 64), (2, 32)])
def test_a_packed_query_holds_the_nearest_fp4_of_its_transform(tokens, width, rng, implementation):
    q, angle = normal(rng, tokens, 3, width), normal(rng, tokens, width // 4)
    parity = np.array([[(i & j).bit_count() % 2 for j in range(width)] for i in range(width)])
    v = (turned(q, angle) @ (1 - 2 * parity) / np.sqrt(width)).reshape(tokens, 3, -1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(v).max(axis=-1, keepdims=True) / 6))
    got = fp4_values(index_queries(q, angle, packed=True)).reshape(v.shape)
    nearest = np.abs(v[..., None] - E2M1 * scale[..., None]).min(axis=-1)
    assert (np.abs(v - got) <= nearest + 1e-5 * scale).all()  # float32 may take the other of two nearly as near


def test_a_packed_query_is_packed_as_rows_are(rng, implementation):
    q, still = normal(rng, 2, 5, 128), np.zeros((2, 32), np.float32)
    same = index_queries(q, still, packed=True) == np.array(kv_round.fp4_pack(mx.array(q)))
    assert same.mean() > 0.99  # sums in another order may round a code near a tie the other way


def test_queries_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 3, 32\) with tables \(1, 8\)"):
        ops.index_queries(mx.zeros((2, 3, 32)), mx.zeros((1, 8)), mx.zeros((1, 8)), packed=True)


@pytest.mark.parametrize("k", [1, 7, 40])
def test_equal_scores_go_to_the_lower_index(k, rng, implementation):
    scores = rng.integers(-3, 3, (9, 40)).astype(np.float32)  # many ties, with both signs and zeros
    scores[:, ::5] *= -0.0                                    # minus zero ties with zero
    scores[2, 10:] = -np.inf
    check_selection(scores, k)


@pytest.mark.parametrize("seen", [0, 1, 6, 7, 8, 19, 20, 30])
@pytest.mark.parametrize("ratio", [1, 4])
def test_hidden_rows_fill_from_the_lowest(seen, ratio, rng, implementation):
    check_selection(normal(rng, 1, 20), 7, ratio * seen + ratio - 2 if seen else 0, ratio)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33, 130])
def test_each_query_sees_up_to_its_position(tokens, rng, implementation):
    scores = np.arange(600, dtype=np.float32) + normal(rng, tokens, 600)  # the hidden ones would win
    check_selection(scores, 512, start=4 * 512 - 3)


def test_queries_of_a_step_stand_anywhere(rng, implementation):
    scores, positions = normal(rng, 5, 600), [2399, 27, 3, 100, 1023]
    scores[np.arange(600) >= (np.array(positions)[:, None] + 1) // 4] = np.nan     # what others left there
    got = np.array(ops.select_rows(mx.array(scores), mx.array(positions), 4, 7))
    for row, position, chosen in zip(scores, positions, got, strict=True):
        np.testing.assert_array_equal(chosen[None], brute_force(row[None], position, 4, 7))


SCORES = {"normal": lambda rng, C: normal(rng, 1, C),
          "all equal": lambda rng, C: np.full((1, C), -0.25, np.float32),
          "mostly zero": lambda rng, C: np.maximum(normal(rng, 1, C) - 2, 0),
          "a crowd at the boundary": lambda rng, C: np.minimum(np.abs(normal(rng, 1, C)), 1.0),
          "any bits": lambda rng, C: np.nan_to_num(rng.integers(0, 2 ** 32, (1, C), np.uint32).view(np.float32),
                                                   nan=-np.inf),
          "one ulp apart": lambda rng, C: (0x3F800000 + rng.permutation(C)[None]).astype(np.uint32).view(np.float32),
          "ascending": lambda rng, C: np.arange(-C, C, 2, dtype=np.float32)[None],
          "nothing but -inf": lambda rng, C: np.full((1, C), -np.inf, np.float32)}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("count", [600, 1024, 5003])  # fewer than a threadgroup's threads, as many, more
def test_the_best_rows_whatever_the_scores_are(kind, count, rng, implementation):
    check_selection(SCORES[kind](rng, count), 512)


@pytest.mark.parametrize("k", [1, 1023, 1024, 1025, 2000])
def test_any_number_of_rows(k, rng, implementation):
    check_selection(normal(rng, 1, 2001), k)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", SCORES)
def test_a_context_of_a_million(kind, rng, emulated):
    check_selection(SCORES[kind](rng, 1 << 18), 512)


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="5 of 4"):
        ops.select_rows(mx.zeros((1, 4)), mx.array([0]), 4, 5)


@pytest.mark.parametrize("packed", [True, False])
def test_kernels_have_no_races(packed, rng, emulated):
    with checking(races=True, debug=True):
        index_queries(normal(rng, 3, 3, 64), normal(rng, 3, 16), packed)
        check_scores(rng, 2, 12, 64, 70, packed)
        check_selection(np.maximum(normal(rng, 2, 1500), 0), 512)
