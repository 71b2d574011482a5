"""Inputs of fewer than 8 elements: MLX passes them in another address space, which a kernel has to be ready for."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.ops.kernel import observe
from ds4mlx.ops.kv_round import fp8_pack


def normal(*shape):
    return mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32))


def integers(*shape):
    return mx.zeros(shape, mx.int32)


def matrix(*shape):
    return ops.Blocks(normal(*shape).view(mx.uint8), "F32")


def gate_up(tokens):
    stack = matrix(1, 32, 32)
    return ops.expert_gate_up(normal(tokens, 32), integers(tokens, 1), normal(tokens, 1), stack, stack, 7.0)


def down(tokens):
    return ops.expert_down(normal(tokens, 1, 32), integers(tokens, 1), matrix(1, 32, 32))


def attention(start, picks=0):
    rows = fp8_pack(normal(130, 128), 64)
    return ops.attention(normal(1, 128), normal(1, 32), normal(1, 32), rows[:start + 1], start, rows[:2],
                         integers(1, picks) if picks else None, 64, normal(1), 128, 1e-6)


def attention_step(picks=0):
    rows = fp8_pack(normal(1, 16, 128), 64)
    return ops.attention_step(normal(1, 128), normal(1, 32), normal(1, 32), rows, mx.array([40]),
                              ops.Paged(rows[0], mx.array([[0]]), 16), 10, integers(1, picks) if picks else None, 4,
                              normal(1), 1e-6)


def compress_token():
    after, rows = ops.compress_token(normal(1, 256), normal(1, 256), normal(1, 8, 2, 256), normal(4, 256), normal(128),
                                     normal(1, 32), normal(1, 32), mx.array([7]), 4, None, 1e-6)
    return after[:, 4:], rows    # the group that is still needed


def mix():
    return ops.hyper_mix(normal(1, 2, 32), matrix(8, 64), (normal(1, 32), normal(1, 2), normal(1, 2, 2)))


def enter(N):
    M = (2 + N) * N
    return ops.hyper_enter(normal(1, N, 32), mx.abs(normal(1, 1, M + 1)), normal(3), normal(M), normal(32), 20, 1e-6,
                           1e-6)


def leave(N):
    return ops.hyper_leave(normal(1, N, 32), mx.abs(normal(1, 1, N + 1)), normal(1), normal(N), normal(32), 1e-6, 1e-6)


# Kernel, its inputs that may be so small in some model, and a call with as few as there can be. Those of `latent`,
# `compress` and the dense products never are, positions aside: rows have 64 channels or 17 bytes at least.
CASES = {
    "expert_matmul_gate_up": (["selected", "weight"], lambda: [gate_up(1)]),
    "expert_matmul_gate_up_tiles": (["table"], lambda: [gate_up(9)]),
    "expert_matmul_down": (["selected"], lambda: [down(1)]),
    "expert_matmul_down_tiles": (["table"], lambda: [down(9)]),
    "attend_attend_chosen0_step0": (["sink"], lambda: [attention(127)]),
    "attend_attend_chosen1_step0": (["sink", "chosen"], lambda: [attention(127, picks=1)]),
    "attend_attend_chosen0_step1": (["pages", "positions", "sink"], lambda: [attention_step()]),
    "attend_attend_chosen1_step1": (["pages", "positions", "sink", "chosen"], lambda: [attention_step(picks=1)]),
    "attend_combine": (["limits"], lambda: [attention(39)]),
    "hyper_mix_mix_update1": (["post", "m"], mix),
    "hyper_mix_enter": (["scale"], lambda: enter(2)),
    "hyper_mix_leave": (["sums", "scale", "base"], lambda: [leave(4)]),
    "indexer_topk_queries": (["cosine", "sine"],
                             lambda: [ops.index_queries(normal(1, 1, 64), normal(1, 2), normal(1, 2), False)]),
    "indexer_topk_scores_paged0": (["weight"],
                                   lambda: [ops.index_scores(normal(1, 1, 64), normal(1, 1), normal(3, 64), 0.5)]),
    "indexer_topk_scores_paged1": (["weight", "pages"], lambda: [ops.index_scores_step(
        normal(1, 1, 64), normal(1, 1), ops.Paged(normal(32, 64), mx.array([[0]]), 32), 3, 0.5)]),
    "latent_latent_ring1": (["positions"], lambda: ops.latent_step(
        normal(1, 32), normal(1, 128), normal(32), normal(128), normal(1, 32), normal(1, 32), normal(1, 2, 128),
        mx.array([5]), False, 1e-6)),
    "compress_token": (["positions"], compress_token),
    "indexer_topk_select": (["scores", "positions"],
                            lambda: [ops.select_rows(normal(1, 5), mx.array([19]), 4, 2)]),
    "route_scored": (["logits", "bias"], lambda: ops.route(normal(1, 6), normal(6), None, integers(1), 2, 1.5)),
    "route_hashed": (["logits", "table", "ids"],
                     lambda: ops.route(normal(1, 6), None, integers(3, 2), integers(1), 2, 1.5)),
    "sample_choose": (["logits", "top_k", "uniform", "temperature", "min_p", "top_p"],
                      lambda: [ops.sample(normal(1, 7), *(np.array([x]) for x in (0.4, 1.0, 3, 0.01, 0.9)))]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_takes_what_is_smaller_than_8(name):
    small, call = CASES[name]
    launches = []
    with ops.only("metal-emulated", exact=True), observe(launches.append):
        found = call()
        mx.eval(found)
    (launch,) = [launch for launch in launches if launch.kernel == name]
    assert small == [buffer for buffer, x in zip(launch.buffers, launch.inputs, strict=True)
                     if isinstance(x, mx.array) and x.ndim and x.size < 8]
    with ops.only("reference"):
        for y, expected in zip(found, call(), strict=True):
            np.testing.assert_allclose(np.array(y), np.array(expected), rtol=1e-4, atol=1e-4)   # float32 sums
