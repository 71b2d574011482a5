"""Deliberate mistakes that the oracle must notice: it is only worth what it can tell apart."""
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import attention, compressor, rope
from ds4mlx.models.deepseek_v4.attention import Attention
from ds4mlx.models.deepseek_v4.compressor import Compressor
from ds4mlx.models.deepseek_v4.experts import MoE
from ds4mlx.models.deepseek_v4.indexer import Indexer
from ds4mlx.models.deepseek_v4.layers import Chunk

NOTICED = 0.5   # in logits of deviation 2; the correct graph is within 5e-5
REAL = {name: getattr(ops, name) for name in ops.__all__} | {"tables": rope.tables, "rms": attention.rms}


def swiglu(clamp_gate_below):
    def mutant(gate, up, limit):
        gate = mx.clip(gate, -limit, limit) if clamp_gate_below else gate
        return gate * mx.sigmoid(gate) * (mx.clip(up, -limit, limit) if clamp_gate_below else up)
    return mutant


def half_split(x, cos, sin, inverse=False):
    n, tail = cos.shape[-1], 2 * cos.shape[-1]
    order = mx.array(np.arange(tail).reshape(2, n).T.reshape(-1))
    y = REAL["rope_tail"](mx.concatenate([x[..., :-tail], x[..., -tail:][..., order]], axis=-1), cos, sin, inverse)
    return mx.concatenate([y[..., :-tail], y[..., -tail:][..., mx.argsort(order)]], axis=-1)


def first_channels(x, cos, sin, inverse=False):
    return REAL["rope_tail"](x[..., ::-1], cos, sin, inverse)[..., ::-1]


def by_stride(x, w, groups=1):
    if groups > 1:
        heads = x.reshape(*x.shape[:-2], groups, -1, x.shape[-1] // 2)
        x = heads.swapaxes(-2, -3).reshape(x.shape)
    return REAL["dense_matmul"](x, w, groups)


def late_rows(positions, f):
    return REAL["tables"](positions + 3, f)


class LateRope:
    tables, frequencies = staticmethod(late_rows), staticmethod(rope.frequencies)


def no_relu(q, weight, rows):
    return (weight[:, None] @ (q @ rows.T))[:, 0]


def biased_weights(self, x, ids):
    selected, _ = ROUTE(self, x, ids)
    p = mx.sqrt(mx.logaddexp(self.gate(x), 0.0)) + (0 if self.hashed else self.gate_bias)
    w = mx.take_along_axis(p, selected, axis=-1)
    return selected, w / w.sum(axis=-1, keepdims=True) * self.config.routed_scaling_factor


def swapped(self, a, before, groups, empty):
    halves = a if not self.overlap else mx.concatenate([a[:, self.width:], a[:, :self.width]], axis=1)
    return SLOTS(self, halves, before, groups, empty)


def unrotated(self, qr, x, chunk):
    q, weight = QUERIES(self, qr, x, chunk)
    return self.wq_b(qr).reshape(q.shape), weight


ROUTE, SLOTS, QUERIES, VISIBLE, TABLES = (MoE.route, Compressor._slots, Indexer.queries, Attention._visible_rows,
                                          Chunk.tables)
MUTATIONS = {
    "mixing matrix not transposed": (
        ops, "hyper_post", lambda y, s, p, m: REAL["hyper_post"](y, s, p, m.swapaxes(1, 2))),
    "row position at the group's last token": (compressor, "rope", LateRope),
    "carry and own halves swapped": (Compressor, "_slots", swapped),
    "own group not visible to its last token": (
        Attention, "_visible_rows", lambda self, t, *rest: VISIBLE(self, np.maximum(t - 1, 0), *rest)),
    "YaRN magnitude applied": (
        Chunk, "tables", lambda self, compressed: tuple(a * (1.277 if compressed else 1)
                                                        for a in TABLES(self, compressed))),
    "plain frequencies on compressed layers": (Chunk, "tables", lambda self, compressed: TABLES(self, False)),
    "rotation of half-split pairs": (ops, "rope_tail", half_split),
    "rotation of the first channels": (ops, "rope_tail", first_channels),
    "no inverse rotation": (
        ops, "rope_tail", lambda x, c, s, inverse=False: x if inverse else REAL["rope_tail"](x, c, s)),
    "sink left out": (ops, "attend", lambda *a: REAL["attend"](*a[:-1], mx.full(a[-1].shape, -1e9))),
    "sink scaled as a score": (ops, "attend", lambda *a: REAL["attend"](*a[:-1], a[-1] * 128 ** -0.5)),
    "no norm of each query head": (attention, "rms", lambda x, eps, w=None: x if w is None else REAL["rms"](x, eps, w)),
    "router bias in the weights": (MoE, "route", biased_weights),
    "shared expert not clamped": ("experts", "swiglu", swiglu(clamp_gate_below=False)),
    "gate clamped from below": ("experts", "swiglu", swiglu(clamp_gate_below=True)),
    "scores without relu": (ops, "index_scores", no_relu),
    "indexer queries not rotated": (Indexer, "queries", unrotated),
    "output heads grouped by stride": (ops, "dense_matmul", by_stride),
}


def largest_difference(model, expected):
    ids = mx.array(expected["p300.input_ids"])[None]
    return np.abs(np.array(model(ids)[0]) - expected["p300.logits"]).max()


@pytest.fixture(scope="module")
def model(load_oracle):
    return load_oracle()


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_oracle_notices(name, model, expected, monkeypatch):
    target, attribute, mutant = MUTATIONS[name]
    monkeypatch.setattr(ops if target == "experts" else target, attribute, mutant)
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
