"""What taps tell of, against an independent implementation's own values (tests/oracle/numpy_forward.py)."""
import numpy as np
import pytest
from oracle import numpy_forward
from oracle.weights import weights

from ds4mlx.engine.mlx_session import MLXSession
from ds4mlx.engine.mlx_taps import watching
from ds4mlx.engine.taps import Taps

LIMIT = 5e-5   # float32 in another order, as in test_oracle.py
LAYERS = range(5)


def watched(model, ids, cut=None):
    """The taps of ids, in one chunk or in two."""
    session, parts = MLXSession(model, len(ids)), []
    for part in (ids[:cut], ids[cut:]) if cut else (ids,):
        start = len(session.tokens)
        with watching(model, LAYERS) as watch:
            session.feed(part)
        parts.append(watch.taps(model, part, start))
    return Taps.joined(parts)


@pytest.fixture(scope="module")
def ids(expected):
    return expected["p130.input_ids"].tolist()


@pytest.fixture(scope="module")
def model(load_oracle):
    return load_oracle()


@pytest.fixture(scope="module")
def taps(model, ids):
    return watched(model, ids)


@pytest.fixture(scope="module")
def witness(ids):
    """Arguments and results of the oracle's own functions, in the order of their calls; and its streams."""
    seen = {name: [] for name in ("mixture", "selected", "hyper_pre", "softmax", "attention")}
    with pytest.MonkeyPatch.context() as patch:
        for name, calls in seen.items():
            def told(*args, _run=getattr(numpy_forward, name), _calls=calls, **more):
                result = _run(*args, **more)
                _calls.append((args, result))
                return result
            patch.setattr(numpy_forward, name, told)
        *streams, logits = numpy_forward.forward(weights(), ids)
    return seen | {"streams": streams, "logits": logits}


def test_streams_and_logits(taps, expected, witness):
    at = expected["p130.hidden_positions"]
    for layer, wanted in zip(LAYERS, expected["p130.hidden"], strict=True):
        np.testing.assert_allclose(taps.layers[layer].streams[at], wanted, atol=LIMIT)
        np.testing.assert_allclose(taps.layers[layer].streams, witness["streams"][layer], atol=LIMIT)
    np.testing.assert_allclose(taps.logits, expected["p130.logits"], atol=LIMIT)
    np.testing.assert_allclose(np.exp(taps.logprobs).sum(-1), 1, atol=1e-5)


def test_the_router_s_choice_and_weights(taps, witness):
    for layer, ((x, tokens, part, _), _) in enumerate(witness["mixture"]):
        prob = np.sqrt(np.logaddexp(0, x @ part["ffn.gate.weight"].T))
        hashed = layer < numpy_forward.HASH_LAYERS
        order = (part["ffn.gate.tid2eid"][tokens] if hashed
                 else np.argsort(-(prob + part["ffn.gate.bias"]), axis=-1)[:, :numpy_forward.CHOSEN])
        found = taps.layers[layer]
        np.testing.assert_array_equal(np.sort(found.experts), np.sort(order))
        share = np.take_along_axis(prob, found.experts.astype(int), axis=-1)
        np.testing.assert_allclose(found.weights, share / share.sum(-1, keepdims=True) * 1.5, atol=LIMIT)


def test_the_rows_that_the_indexer_chose(taps, witness):
    layers = [layer for layer in LAYERS if taps.layers[layer].rows is not None]
    assert layers == [2, 4]
    for layer, (_, wanted) in zip(layers, witness["selected"], strict=True):
        found = [set(rows[rows >= 0].tolist()) for rows in taps.layers[layer].rows]
        assert found == [set(np.flatnonzero(row).tolist()) for row in wanted]


def test_the_shares_of_window_and_compressed_rows(taps, witness, ids):
    rows = [result for _, result in witness["softmax"] if result.shape[0] == len(ids) < result.shape[-1]]
    shares = [result[..., :-1] for result in rows]      # without the sink's
    for layer, wanted in zip(LAYERS, shares, strict=True):
        found = taps.layers[layer]
        np.testing.assert_allclose(found.window_mass, wanted[..., :len(ids)].sum(-1), atol=LIMIT)
        np.testing.assert_allclose(found.compressed_mass, wanted[..., len(ids):].sum(-1), atol=LIMIT)


def test_the_hyper_connection_s_matrices(taps, witness):
    attn, ffn = witness["hyper_pre"][::2], witness["hyper_pre"][1::2]
    for layer, (_, (_, post, mix)) in enumerate(attn):
        np.testing.assert_allclose(taps.layers[layer].attn_post, post, atol=LIMIT)
        np.testing.assert_allclose(taps.layers[layer].attn_mix, mix, atol=LIMIT)
    for layer, (_, (_, post, mix)) in enumerate(ffn):
        np.testing.assert_allclose(taps.layers[layer].ffn_post, post, atol=LIMIT)
        np.testing.assert_allclose(taps.layers[layer].ffn_mix, mix, atol=LIMIT)


def test_the_outputs_of_attention_and_experts(taps, witness):
    for layer in LAYERS:
        np.testing.assert_allclose(taps.layers[layer].attn, witness["attention"][layer][1], atol=LIMIT)
        np.testing.assert_allclose(taps.layers[layer].ffn, witness["mixture"][layer][1], atol=LIMIT)


@pytest.mark.parametrize("cut", [1, 30, 37])   # before the indexer has more rows than it chooses, and behind
def test_a_span_in_two_chunks_is_the_same(model, ids, taps, cut):
    found = watched(model, ids, cut)
    np.testing.assert_allclose(found.logits, taps.logits, atol=LIMIT)
    for layer in LAYERS:
        np.testing.assert_array_equal(np.sort(found.layers[layer].experts), np.sort(taps.layers[layer].experts))
        np.testing.assert_allclose(found.layers[layer].window_mass, taps.layers[layer].window_mass, atol=LIMIT)


def test_watching_changes_nothing(model, ids):
    alone, seen = MLXSession(model, 200), MLXSession(model, 200)
    alone.feed(ids)
    with watching(model, LAYERS):
        seen.feed(ids)
    np.testing.assert_array_equal(seen.logits(), alone.logits())


def test_a_watch_that_fails_leaves_the_model_as_it_was(model, ids):
    layers = model.layers
    with pytest.raises(ValueError, match="context is 5"), watching(model, LAYERS):
        MLXSession(model, 5).feed(ids)
    assert model.layers is layers
    assert all("route" not in vars(layer.ffn) and "attend" not in vars(layer.attn) for layer in layers)
