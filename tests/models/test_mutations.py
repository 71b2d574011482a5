"""Deliberate mistakes that the oracle must notice: it is only worth what it can tell apart."""
from dataclasses import replace
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.experts import MoE
from ds4mlx.models.deepseek_v4.layers import Chunk, rotary

NOTICED = 0.5   # in logits of deviation 2; the correct graph is within 5e-5
REAL = {name: getattr(ops, name) for name in ops.__all__} | {"rms_norm": mx.fast.rms_norm}
attend, compress, expert_matmul, indexer_topk, latent = (
    import_module(f"ds4mlx.ops.{name}") for name in ("attend", "compress", "expert_matmul", "indexer_topk", "latent"))
ROUTE, TABLES = MoE.route, Chunk.tables
ROTATIONS = [(attend, "rope_tail"), (latent, "rope_reference"), (compress, "rope_reference"),
             (indexer_topk, "rope_reference")]
SINK, SHARED = 8, 6     # their places among the arguments of attention and of expert_gate_up


def swiglu(clamp_gate_below):
    def mutant(gate, up, limit):
        gate = mx.clip(gate, -limit, limit) if clamp_gate_below else gate
        return gate * mx.sigmoid(gate) * (mx.clip(up, -limit, limit) if clamp_gate_below else up)
    return mutant


def unclamped_shared(x, selected, weight, gate, up, limit, shared):
    mid = REAL["expert_gate_up"](x, selected, weight, gate, up, limit, shared)
    mid[:, -1] = swiglu(clamp_gate_below=False)(*ops.dense_matmuls(x, shared), limit)
    return mid


def half_split(x, cos, sin, inverse=False):
    n, tail = cos.shape[-1], 2 * cos.shape[-1]
    order = mx.array(np.arange(tail).reshape(2, n).T.reshape(-1))
    y = REAL["rope_tail"](mx.concatenate([x[..., :-tail], x[..., -tail:][..., order]], axis=-1), cos, sin, inverse)
    return mx.concatenate([y[..., :-tail], y[..., -tail:][..., mx.argsort(order)]], axis=-1)


def first_channels(x, cos, sin, inverse=False):
    return REAL["rope_tail"](x[..., ::-1], cos, sin, inverse)[..., ::-1]


def by_stride(x, w, groups=1):
    if groups > 1:
        heads = x.reshape(*x.shape[:-1], groups, 2, -1)
        x = heads.swapaxes(-2, -3).reshape(x.shape)
    return REAL["dense_matmul"](x, w, groups)


def one_late(q, cos, sin, window, start, rows, chosen, ratio, *rest):
    """Token by token, with the rows that a query one earlier would see."""
    def token(j):
        count, end = (start + j) // ratio if ratio else 0, window.shape[0] - q.shape[0] + j + 1
        named = None if chosen is None else mx.where(chosen[j:j + 1] < count, chosen[j:j + 1], 1 << 30)
        return REAL["attention"](q[j:j + 1], cos[j:j + 1], sin[j:j + 1], window[:end], start + j,
                                 rows[:count] if count and named is None else rows if count else None,
                                 named if count else None, ratio if count else 0, *rest)
    return mx.concatenate([token(j) for j in range(q.shape[0])])


def without_relu(q, weight, rows, scale, positions):
    return scale * (weight[:, None] @ (q @ rows.T))[:, 0]


def biased_weights(self, x, ids):
    selected, _ = ROUTE(self, x, ids)
    p = mx.sqrt(mx.logaddexp(self.gate(x), 0.0)) + (0 if self.hashed else self.gate_bias)
    w = mx.take_along_axis(p, selected, axis=-1)
    return selected, w / w.sum(axis=-1, keepdims=True) * self.config.routed_scaling_factor


def swapped(k, s, frontier, ape, norm, *rest):
    def halves(a):
        w = norm.shape[0]
        return a if a.shape[-1] == w else mx.concatenate([a[..., w:], a[..., :w]], axis=-1)
    return REAL["compress_step"](halves(k), halves(s), frontier, halves(ape), norm, *rest)


def with_argument(op, place, change):
    return lambda *args: REAL[op](*args[:place], change(args[place]), *args[place + 1:])


def last_positions(self, ratio):
    return rotary(self.config, np.arange(self.start // ratio, self.end // ratio) * ratio + ratio - 1, True)


MUTATIONS = {
    "mixing matrix not transposed": [
        (ops, "hyper_input", with_argument("hyper_input", 2, lambda u: u and u._replace(m=u.m.swapaxes(1, 2))))],
    "row position at the group's last token": [(Chunk, "group_tables", last_positions)],
    "carry and own halves swapped": [(ops, "compress_step", swapped)],
    "own group not visible to its last token": [(ops, "attention", one_late)],
    "YaRN magnitude applied": [
        (Chunk, "tables", lambda self, compressed: tuple(a * (1.277 if compressed else 1)
                                                         for a in TABLES(self, compressed)))],
    "plain frequencies on compressed layers": [(Chunk, "tables", lambda self, compressed: TABLES(self, False))],
    "rotation of half-split pairs": [(*place, half_split) for place in ROTATIONS],
    "rotation of the first channels": [(*place, first_channels) for place in ROTATIONS],
    "no inverse rotation": [
        (attend, "rope_tail", lambda x, c, s, inverse=False: x if inverse else REAL["rope_tail"](x, c, s))],
    "sink left out": [
        (ops, "attention", with_argument("attention", SINK, lambda sink: mx.full(sink.shape, -1e9)))],
    "sink scaled as a score": [(ops, "attention", with_argument("attention", SINK, lambda sink: sink * 128 ** -0.5))],
    "no norm of each query head": [
        (mx.fast, "rms_norm", lambda x, w, eps: x if w is None else REAL["rms_norm"](x, w, eps))],
    "router bias in the weights": [(MoE, "route", biased_weights)],
    "shared expert not clamped": [(ops, "expert_gate_up", unclamped_shared)],
    "gate clamped from below": [(expert_matmul, "swiglu", swiglu(clamp_gate_below=True))],
    "scores without relu": [(ops, "index_scores", without_relu)],
    "indexer queries not rotated": [(ops, "index_queries", lambda q, cos, sin, packed: q)],
    "output heads grouped by stride": [(ops, "dense_matmul", by_stride)],
}


def largest_difference(model, expected):
    ids = mx.array(expected["p300.input_ids"])[None]
    return np.abs(np.array(model(ids)[0]) - expected["p300.logits"]).max()


@pytest.fixture(autouse=True)
def references():
    """Mutants replace parts of the references; a fused implementation has no such parts."""
    with ops.only("reference"):
        yield


@pytest.fixture(scope="module")
def model(load_oracle):
    return load_oracle()


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_oracle_notices(name, model, expected, monkeypatch):
    for target, attribute, mutant in MUTATIONS[name]:
        monkeypatch.setattr(target, attribute, mutant)
    assert largest_difference(model, expected) > NOTICED


@pytest.mark.parametrize("change", [{"sliding_window": 127}, {"sliding_window": 129}, {"index_topk": 10_000},
                                    {"hc_sinkhorn_iters": 2}], ids=str)
def test_the_oracle_notices_a_wrong_size(change, load_oracle, oracle_file, expected):
    from ds4mlx.models.deepseek_v4.names import validate
    config = replace(validate(oracle_file), **change)
    noticed = 1e-2 if "hc_sinkhorn_iters" in change else NOTICED
    assert largest_difference(load_oracle(config=config), expected) > noticed


def test_the_oracle_notices_a_router_without_its_bias(load_oracle, expected):
    model = load_oracle()
    for layer in model.layers:
        if layer.ffn.gate_bias is not None:
            layer.ffn.gate_bias = mx.zeros_like(layer.ffn.gate_bias)
    assert largest_difference(model, expected) > NOTICED


def test_without_a_mutation_there_is_nothing_to_notice(model, expected):
    assert largest_difference(model, expected) < 5e-5
