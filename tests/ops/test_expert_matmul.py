import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize

E, D, F, LIMIT = 5, 256, 512, 1.5
KINDS = [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("MXFP4", "MXFP4")]


def chosen(rng, tokens, each=3):
    return np.stack([rng.permutation(E)[:each] for _ in range(tokens)]).astype(np.int32)


def spelled_out(x, selected, weight, gate, up):
    """One token and slot at a time, in float64."""
    mid = np.zeros((*selected.shape, F))
    for t, s in np.ndindex(*selected.shape):
        g, u = (w[selected[t, s]].astype(np.float64) @ x[t] for w in (gate, up))
        g = np.minimum(g, LIMIT)
        mid[t, s] = weight[t, s] * g / (1 + np.exp(-g)) * np.clip(u, -LIMIT, LIMIT)
    return mid


@pytest.mark.parametrize("kind", [kinds[0] for kinds in KINDS])
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_gate_and_up_of_the_chosen_experts(kind, tokens, implementation, random_blocks, rng):
    gate, up, selected = random_blocks(kind, E, F, D), random_blocks(kind, E, F, D), chosen(rng, tokens)
    x, weight = rng.normal(0, 0.01, (tokens, D)).astype(np.float32), rng.random((tokens, 3)).astype(np.float32)
    mid = ops.expert_gate_up(mx.array(x), mx.array(selected), mx.array(weight), ops.Blocks(gate, kind),
                             ops.Blocks(mx.array(up), kind), LIMIT)
    expected = spelled_out(x, selected, weight, dequantize(gate, kind), dequantize(up, kind))
    np.testing.assert_allclose(np.array(mid), expected, atol=2e-6)  # unit size before the gate; sums of 256 products


@pytest.mark.parametrize("kind", [kinds[1] for kinds in KINDS])
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_down_sums_over_the_chosen_experts(kind, tokens, implementation, random_blocks, rng):
    down, selected = random_blocks(kind, E, D, F), chosen(rng, tokens)
    mid = rng.normal(size=(tokens, 3, F)).astype(np.float32)
    w = dequantize(down, kind).astype(np.float64)
    expected = np.stack([sum(w[e] @ m for e, m in zip(*pair, strict=True)) for pair in zip(selected, mid, strict=True)])
    y = ops.expert_down(mx.array(mid), mx.array(selected), ops.Blocks(down, kind))
    np.testing.assert_allclose(np.array(y), expected, atol=2e-5 * np.abs(expected).max())


def test_only_chosen_experts_are_read(implementation, random_blocks, rng):
    down, selected = random_blocks("Q8_0", E, D, F), np.array([[1, 3]], np.int32)
    down[[0, 2, 4], :, :2] = 0xFF  # scales that are not finite: reading them would show
    y = ops.expert_down(mx.array(rng.normal(size=(1, 2, F)), mx.float32), mx.array(selected), ops.Blocks(down, "Q8_0"))
    assert mx.isfinite(y).all().item()
