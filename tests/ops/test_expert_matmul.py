import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize

E, D, F, LIMIT = 5, 256, 512, 1.5
KINDS = [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("MXFP4", "MXFP4")]


def chosen(rng, tokens, each=3):
    return np.stack([rng.permutation(E)[:each] for _ in range(tokens)]).astype(np.int32)


def one_slot(x, gate, up):
    g, u = (w.astype(np.float64) @ x for w in (gate, up))
    g = np.minimum(g, LIMIT)
    return g / (1 + np.exp(-g)) * np.clip(u, -LIMIT, LIMIT)


def spelled_out(x, selected, weight, gate, up, shared):
    """One token and slot at a time, in float64; the shared expert last."""
    mid = np.zeros((len(x), selected.shape[1] + 1, F))
    for t, s in np.ndindex(*selected.shape):
        mid[t, s] = weight[t, s] * one_slot(x[t], gate[selected[t, s]], up[selected[t, s]])
    for t in range(len(x)):
        mid[t, -1] = one_slot(x[t], *shared)
    return mid


@pytest.mark.parametrize("kind", [kinds[0] for kinds in KINDS])
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_gate_and_up_of_the_chosen_and_the_shared_expert(kind, tokens, implementation, random_blocks, rng):
    gate, up, selected = random_blocks(kind, E, F, D), random_blocks(kind, E, F, D), chosen(rng, tokens)
    shared = random_blocks("Q8_0", F, D), random_blocks("Q8_0", F, D)
    x, weight = rng.normal(0, 0.01, (tokens, D)).astype(np.float32), rng.random((tokens, 3)).astype(np.float32)
    mid = ops.expert_gate_up(mx.array(x), mx.array(selected), mx.array(weight), ops.Blocks(gate, kind),
                             ops.Blocks(mx.array(up), kind), LIMIT, tuple(ops.Blocks(w, "Q8_0") for w in shared))
    expected = spelled_out(x, selected, weight, dequantize(gate, kind), dequantize(up, kind),
                           [dequantize(w, "Q8_0") for w in shared])
    np.testing.assert_allclose(np.array(mid), expected, atol=2e-6)  # unit size before the gate; sums of 256 products


@pytest.mark.parametrize("kind", [kinds[1] for kinds in KINDS])
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_down_sums_over_the_chosen_and_the_shared_expert(kind, tokens, implementation, random_blocks, rng):
    down, shared, selected = random_blocks(kind, E, D, F), random_blocks("Q8_0", D, F), chosen(rng, tokens)
    mid = rng.normal(size=(tokens, 4, F)).astype(np.float32)
    w, last = dequantize(down, kind).astype(np.float64), dequantize(shared, "Q8_0").astype(np.float64)
    expected = [last @ m[3] + sum(w[e] @ row for e, row in zip(experts, m[:3], strict=True))
                for experts, m in zip(selected, mid, strict=True)]
    y = ops.expert_down(mx.array(mid), mx.array(selected), ops.Blocks(down, kind), ops.Blocks(shared, "Q8_0"))
    np.testing.assert_allclose(np.array(y), expected, atol=2e-5 * np.abs(expected).max())


def test_only_chosen_experts_are_read(implementation, random_blocks, rng):
    down, selected = random_blocks("Q8_0", E, D, F), np.array([[1, 3]], np.int32)
    down[[0, 2, 4], :, :2] = 0xFF  # scales that are not finite: reading them would show
    y = ops.expert_down(mx.array(rng.normal(size=(1, 2, F)), mx.float32), mx.array(selected), ops.Blocks(down, "Q8_0"))
    assert mx.isfinite(y).all().item()


def test_what_does_not_go_together_is_named():
    x, selected, blocks = mx.zeros((1, 32)), mx.zeros((1, 2), mx.int32), ops.Blocks(mx.zeros((2, 4, 64), mx.uint8), "F16")
    with pytest.raises(ValueError, match="gate is F16 .* up Q8_0"):
        ops.expert_gate_up(x, selected, mx.zeros((1, 2)), blocks, ops.Blocks(blocks.raw, "Q8_0"), LIMIT)
    with pytest.raises(ValueError, match=r"mid \(1, 3, 32\) for 2 slots"):
        ops.expert_down(mx.zeros((1, 3, 32)), selected, blocks)
