import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.metal_kernels.emulator import checking, counting
from ds4mlx.ops.expert_matmul import Tiles

E, S, LIMIT = 5, 3, 1.5
D, F = 256, 512
TOKENS = [1, 2, 5, 8, 9, 33, 130]  # decode up to 8, then small tiles, then large ones
CASES = [("IQ2_XXS", "Q2_K", tokens) for tokens in TOKENS] + [
    (kind, kind, tokens) for kind in ("Q4_K", "MXFP4") for tokens in (1, 33)]
HALF = 2e-3  # of the largest value: half has 11 bits, and the errors of some hundred products partly cancel


def chosen(rng, tokens):
    return np.stack([rng.permutation(E)[:S] for _ in range(tokens)]).astype(np.int32)


def one_slot(x, gate, up):
    g, u = (w.astype(np.float64) @ x for w in (gate, up))
    g = np.minimum(g, LIMIT)
    return g / (1 + np.exp(-g)) * np.clip(u, -LIMIT, LIMIT)


@pytest.fixture
def gate_up(random_blocks, rng):
    """gate_up(kind, selected) -> what the op finds, and one token and slot after the other in float64."""
    def run(kind, selected, weight=None, spread=0.01, rows=F, shared="Q8_0"):
        x = rng.normal(0, spread, (len(selected), D)).astype(np.float32)
        weight = rng.random(selected.shape).astype(np.float32) if weight is None else weight
        gate, up = random_blocks(kind, E, rows, D), random_blocks(kind, E, rows, D)
        last = random_blocks(shared, rows, D), random_blocks(shared, rows, D)
        mid = ops.expert_gate_up(mx.array(x), mx.array(selected), mx.array(weight), ops.Blocks(gate, kind),
                                 ops.Blocks(mx.array(up), kind), LIMIT, tuple(ops.Blocks(w, shared) for w in last))
        gate, up, last = dequantize(gate, kind), dequantize(up, kind), [dequantize(w, shared) for w in last]
        return np.array(mid), np.array([
            [w * one_slot(row, gate[e], up[e]) for e, w in zip(*slots, strict=True)] + [one_slot(row, *last)]
            for row, *slots in zip(x, selected, weight, strict=True)])
    return run


@pytest.fixture
def down(random_blocks, rng):
    """down(kind, selected) -> what the op finds, and the sum over the slots in float64."""
    def run(kind, selected, rows=D, shared="Q8_0"):
        mid = rng.normal(size=(len(selected), S + 1, F)).astype(np.float32)
        blocks, last = random_blocks(kind, E, rows, F), random_blocks(shared, rows, F)
        y = ops.expert_down(mx.array(mid), mx.array(selected), ops.Blocks(blocks, kind), ops.Blocks(last, shared))
        w, last = dequantize(blocks, kind).astype(np.float64), dequantize(last, shared).astype(np.float64)
        return np.array(y), np.array([last @ m[S] + sum(w[e] @ m[s] for s, e in enumerate(experts))
                                      for experts, m in zip(selected, mid, strict=True)])
    return run


def assert_close(found, expected, part):
    np.testing.assert_allclose(found, expected, rtol=0, atol=part * np.abs(expected).max())


@pytest.mark.parametrize("kind, _, tokens", CASES)
def test_gate_and_up_of_the_chosen_and_the_shared_expert(kind, _, tokens, implementation, gate_up, rng):
    with ops.only(implementation, exact=True):
        found, expected = gate_up(kind, chosen(rng, tokens))
    np.testing.assert_allclose(found, expected, atol=5e-6)  # sums of 256 products that are near the limit


@pytest.mark.parametrize("_, kind, tokens", CASES)
def test_down_sums_over_the_chosen_and_the_shared_expert(_, kind, tokens, implementation, down, rng):
    with ops.only(implementation, exact=True):
        assert_close(*down(kind, chosen(rng, tokens)), 2e-5)


@pytest.mark.parametrize("tokens", [9, 33])
def test_tiles_of_halves_are_near(tokens, emulated, gate_up, down, rng):
    selected = chosen(rng, tokens)
    assert_close(*gate_up("IQ2_XXS", selected), HALF)
    assert_close(*down("Q2_K", selected), HALF)


@pytest.mark.parametrize("tokens", [2, 8, 33])
def test_one_expert_may_take_all_tokens_and_a_token_may_name_it_again(tokens, emulated, gate_up, down, rng):
    selected = np.full((tokens, S), 4, np.int32)
    selected[1:, 0] = rng.integers(0, E, tokens - 1)
    assert_close(*gate_up("IQ2_XXS", selected), HALF)
    assert_close(*down("Q2_K", selected), HALF)


@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_need_not_fill_a_threadgroup(tokens, emulated, gate_up, down, rng):
    selected = chosen(rng, tokens)
    assert_close(*gate_up("MXFP4", selected, rows=37), HALF)
    assert_close(*down("MXFP4", selected, rows=67), HALF)


@pytest.mark.parametrize("tokens", [1, 33])
def test_values_past_the_limits_are_clamped_and_weights_may_be_0(tokens, implementation, gate_up, rng):
    weight = np.array([[0, 1, 1]] * tokens, np.float32)
    with ops.only(implementation, exact=True):
        found, expected = gate_up("MXFP4", chosen(rng, tokens), weight, spread=1)
    top = LIMIT ** 2 / (1 + np.exp(-LIMIT))
    assert (expected == 0).any() and np.isclose(expected, top).any() and np.isclose(expected, -top).any()
    np.testing.assert_allclose(found, expected, atol=1e-4)  # 256 products of size 10 before the gate


@pytest.mark.parametrize("slots, experts", [(14, 20), (16, 20), (2, 8192), (2, 8200)])
def test_as_many_experts_as_a_file_may_describe(slots, experts, emulated, random_blocks, rng):
    selected = np.argsort(rng.random((9, experts)))[:, :slots].astype(np.int32)
    w, mid = random_blocks("Q8_0", experts, 3, 32), rng.normal(size=(9, slots, 32)).astype(np.float32)
    expected = np.einsum("tsnk,tsk->tn", dequantize(w, "Q8_0")[selected], mid)
    for part in (slice(0, 9), slice(0, 2)):
        y = ops.expert_down(mx.array(mid[part]), mx.array(selected[part]), ops.Blocks(w, "Q8_0"))
        assert_close(np.array(y), expected[part], HALF)


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_damaged_token_or_weight_shows(tokens, implementation, random_blocks, rng):
    x, (gate, up), limit = rng.normal(size=(tokens, D)).astype(np.float32), random_blocks("F32", 2, E, F, D), LIMIT
    x[1], gate[3, 5, :4], up[3, 6, :4] = np.nan, 0xFF, 0xFF
    selected, stacks = np.array([[0, 3]] + [[1, 2]] * (tokens - 1)), [ops.Blocks(w, "F32") for w in (gate, up)]
    mid = np.array(ops.expert_gate_up(mx.array(x), mx.array(selected, mx.int32), mx.ones((tokens, 2)), *stacks, limit))
    damaged = np.zeros(mid.shape, bool)
    damaged[1], damaged[0, 1, 5:7] = True, True
    np.testing.assert_array_equal(np.isnan(mid), damaged)


def test_only_chosen_experts_are_read(implementation, random_blocks, rng):
    down, selected = random_blocks("Q8_0", E, D, F), np.array([[1, 3]], np.int32)
    down[[0, 2, 4], :, :2] = 0xFF  # scales that are not finite: reading them would show
    y = ops.expert_down(mx.array(rng.normal(size=(1, 2, F)), mx.float32), mx.array(selected), ops.Blocks(down, "Q8_0"))
    assert mx.isfinite(y).all().item()


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_may_lie_past_4_gib(tokens, emulated, random_blocks, rng):
    experts, rows, width = 4000, 1024, 1024   # 1.1 MB each, and no memory where nobody writes
    stack, shape = np.zeros((experts, rows, width // 32 * 34), np.uint8), (tokens, 2, width)
    stack[[1990, 3999]] = random_blocks("Q8_0", 2, rows, width)
    assert stack[:1990].nbytes > 1 << 31 and stack[:3999].nbytes > 1 << 32
    w, vectors = dequantize(stack[[1990, 3999]], "Q8_0"), rng.normal(size=shape).astype(np.float32)
    blocks, selected = ops.Blocks(stack, "Q8_0"), mx.array([[1990, 3999]] * tokens, mx.int32)
    y = ops.expert_down(mx.array(vectors), selected, blocks)
    assert_close(np.array(y), np.einsum("enk,tek->tn", w, vectors), HALF)
    mid = ops.expert_gate_up(mx.array(vectors[:, 0]), selected, mx.ones((tokens, 2)), blocks, blocks, 1e6)
    gates = np.einsum("enk,tk->ten", w, vectors[:, 0]).astype(np.float64)
    assert_close(np.array(mid), gates * gates / (1 + np.exp(-gates)), HALF)


@pytest.mark.parametrize("tokens", [2, 9])
def test_no_result_depends_on_the_order_of_threads(tokens, emulated, gate_up, down, rng):
    with checking(races=True, debug=True):
        assert_close(*gate_up("IQ2_XXS", chosen(rng, tokens), rows=32), HALF)
        assert_close(*down("Q2_K", chosen(rng, tokens), rows=64), HALF)


@pytest.mark.parametrize("tokens, slots, experts", [(9, 1, 1), (33, 3, 5), (2048, 6, 384)])
def test_tiles_hold_the_pairs_of_each_expert_in_order(tokens, slots, experts, emulated, rng):
    selected = np.minimum(rng.geometric(0.05, (tokens, slots)), experts).astype(np.int32) - 1  # a few take most
    tiles = Tiles.of(mx.array(selected), experts)
    order, size = np.array(tiles.order), dict(tiles.template)["BM"]
    np.testing.assert_array_equal(order, np.argsort(selected.reshape(-1), kind="stable"))
    expected = [(e, first, min(size, end - first)) for e in range(experts)
                for begin, end in [np.searchsorted(np.sort(selected.reshape(-1)), [e, e + 1])]
                for first in range(begin, end, size)]
    table = np.array(tiles.table)
    np.testing.assert_array_equal(table[:len(expected)], expected)
    assert not table[len(expected):].any()


def test_decode_reads_a_weight_once_whoever_selects_its_expert(emulated, random_blocks):
    wide, last = random_blocks("IQ2_XXS", E, 32, 4096), random_blocks("Q8_0", 32, 4096)
    stack, shared = ops.Blocks(wide, "IQ2_XXS"), ops.Blocks(last, "Q8_0")
    selected = mx.array([[0, 2], [2, 4]], mx.int32)
    with counting() as launches:
        ops.expert_gate_up(mx.ones((2, 4096)), selected, mx.ones((2, 2)), stack, stack, LIMIT, (shared, shared))
        ops.expert_down(mx.ones((2, 3, 4096)), selected, stack, shared)
    read = [sum(buffer.reads.group_bytes for buffer in launch.buffers.values() if buffer.buffer_bytes >= last.nbytes)
            for launch in launches]
    least = 3 * wide[0].nbytes + last.nbytes
    assert 2 * least <= read[0] <= 2.1 * least and least <= read[1] <= 1.05 * least


@pytest.mark.sweep
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 17, 130])
@pytest.mark.parametrize("shared", ["F16", "F32", "Q8_0"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"])
def test_experts_of_any_type_beside_a_shared_one_of_another(kind, shared, tokens, emulated, gate_up, down, rng):
    selected = chosen(rng, tokens)
    assert_close(*gate_up(kind, selected, rows=72, shared=shared), HALF)
    assert_close(*down(kind, selected, rows=72, shared=shared), HALF)


def test_what_does_not_go_together_is_named():
    x, ids, blocks = mx.zeros((1, 32)), mx.zeros((1, 2), mx.int32), ops.Blocks(mx.zeros((2, 4, 64), mx.uint8), "F16")
    with pytest.raises(ValueError, match="gate is F16 .* up Q8_0"):
        ops.expert_gate_up(x, ids, mx.zeros((1, 2)), blocks, ops.Blocks(blocks.raw, "Q8_0"), LIMIT)
    with pytest.raises(ValueError, match=r"mid \(1, 3, 32\) for 2 slots"):
        ops.expert_down(mx.zeros((1, 3, 32)), ids, blocks)
