"""The graph against an independent implementation of the model, run in float32."""
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import state
from oracle.weights import CONFIG

from ds4mlx import ops
from ds4mlx.engine.mlx_session import MLXSession

PROMPTS = [5, 130, 300, 700]
LIMIT = 5e-5   # in logits of deviation 2: float32 in another order. A wrong Sinkhorn count alone gives 2e-4


def run(model, ids, sizes):
    """Logits of all positions, fed in chunks of `sizes`; the last size repeats."""
    cache, rows, at = model.make_cache(), [], 0
    for size in [*sizes, *[sizes[-1]] * len(ids)]:
        if at < len(ids):
            rows.append(np.array(model(mx.array(ids[None, at:at + size]), cache)[0]))
            mx.eval([layer.state for layer in cache])
            at += size
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def model(load_oracle):
    return load_oracle()


@pytest.mark.parametrize("n", PROMPTS)
@pytest.mark.parametrize("sizes", [[700], [37], [128], [1, 3, 97, 700]], ids=str)
def test_logits_in_one_shot_and_in_chunks(n, sizes, model, expected):
    found = run(model, expected[f"p{n}.input_ids"], sizes)
    np.testing.assert_allclose(found, expected[f"p{n}.logits"], atol=LIMIT)
    np.testing.assert_array_equal(found.argmax(-1), expected[f"p{n}.logits"].argmax(-1))


@pytest.mark.parametrize("n", [5, 130])
def test_logits_token_by_token(n, model, expected):
    np.testing.assert_allclose(run(model, expected[f"p{n}.input_ids"], [1]), expected[f"p{n}.logits"], atol=LIMIT)


@pytest.mark.parametrize("sizes", [[37], [1, 3, 97, 700]], ids=str)
def test_leading_layers_of_ratio_128_as_pro_has_them(sizes, load_oracle, expected):
    model, ids = load_oracle(), expected["p300.input_ids"]
    model.config = replace(model.config, compress_ratios=(128, 128, 4, 128, 4))
    model.layers[0].attn = model.layers[1].attn = model.layers[3].attn
    np.testing.assert_allclose(run(model, ids, sizes), run(model, ids, [300]), atol=LIMIT)


@pytest.mark.parametrize("n", PROMPTS)
def test_hidden_streams_after_each_layer(n, model, expected, monkeypatch):
    seen = []
    step = type(model.layers[0]).__call__
    monkeypatch.setattr(type(model.layers[0]), "__call__", lambda *a: seen.append(step(*a)) or seen[-1])
    model(mx.array(expected[f"p{n}.input_ids"])[None])
    at = mx.array(expected[f"p{n}.hidden_positions"])
    for (streams, update), wanted in zip(seen, expected[f"p{n}.hidden"], strict=True):
        found = ops.hyper_mix(streams, model.hc_head_fn.weight, update)[0][at]
        np.testing.assert_allclose(np.array(found), wanted, atol=LIMIT)


@pytest.fixture
def rounded(load_oracle, monkeypatch):
    """The model with rows rounded but not packed: rotary tails stay float32, as the oracle has them."""
    model, tail = load_oracle(), CONFIG["qk_rope_head_dim"]
    real = {name: getattr(ops, name) for name in ops.__all__}

    def fp8_round(row):
        rounded = ops.fp8_unpack(ops.fp8_pack(row, tail), row.shape[-1], tail)
        return mx.concatenate([rounded[:, :-tail], row[:, -tail:]], axis=-1)

    def fp4_round(v):
        return ops.fp4_unpack(ops.fp4_pack(v), v.shape[-1])

    def latent(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
        qr, rows = real["latent"](q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)
        return qr, mx.concatenate([window, fp8_round(rows[window.shape[0]:])])

    def compress_step(*args):
        frontier, rows = real["compress_step"](*args)
        if rows is None:
            return frontier, None
        indexers = (layer.attn.indexer for layer in model.layers if layer.attn.ratio == 4)
        of_index = any(indexer.compressor.norm is args[4] for indexer in indexers)
        return frontier, fp4_round(rows) if of_index else fp8_round(rows)

    monkeypatch.setattr(ops, "latent", latent)
    monkeypatch.setattr(ops, "compress_step", compress_step)
    monkeypatch.setattr(ops, "index_queries", lambda *args: fp4_round(real["index_queries"](*args)))
    return model


def test_official_rounding_row_by_row(rounded, expected):
    """Rounding is discontinuous, so rows may differ where a value lies on an edge: the shares are what is bounded."""
    found = {n: run(rounded, expected[f"p{n}.input_ids"], [n]) for n in PROMPTS[:3]}
    worst = np.concatenate([np.abs(found[n] - expected[f"p{n}.logits_lowp"]).max(-1) for n in found])
    same = np.concatenate([found[n].argmax(-1) == expected[f"p{n}.logits_lowp"].argmax(-1) for n in found])
    assert (worst < 1e-3).mean() >= 0.8 and worst.max() < 0.5 and same.mean() >= 0.97


def test_packing_adds_no_more_than_its_half_precision_tails(load_oracle, expected):
    """Tails of 11 bits, where the oracle has 24, move logits of deviation 2 by a hundredth; other rounding by 3."""
    found = {n: run(load_oracle("official"), expected[f"p{n}.input_ids"], [n]) for n in PROMPTS[:3]}
    worst = np.concatenate([np.abs(found[n] - expected[f"p{n}.logits_lowp"]).max(-1) for n in found])
    same = np.concatenate([found[n].argmax(-1) == expected[f"p{n}.logits_lowp"].argmax(-1) for n in found])
    assert np.median(worst) < 0.05 and same.mean() >= 0.97


def test_rounding_is_visible(load_oracle, expected):
    found = run(load_oracle("official"), expected["p300.input_ids"], [300])
    assert np.abs(found - expected["p300.logits"]).max() > 0.5


@pytest.mark.parametrize("n", [3, 4, 5, 127, 128, 129, 131, 132, 255, 256, 257])
def test_a_saved_state_continues_as_if_it_had_never_stopped(n, model, expected):
    ids = expected["p300.input_ids"].tolist()
    whole, loaded = MLXSession(model, 300), MLXSession(model, 300)
    whole.feed(ids[:n])
    saved = state.whole(whole)
    loaded.restore(saved)
    again = state.whole(loaded)
    assert all(again[name].tobytes() == saved[name].tobytes() for name in saved)
    for session in (whole, loaded):
        session.feed(ids[n:])
    np.testing.assert_array_equal(loaded.logits(), whole.logits())
    np.testing.assert_allclose(loaded.logits(), expected["p300.logits"][-1], atol=1e-4)
