"""Steering: directions built from pairs of prompts, in sessions, in files, in the engine."""
import numpy as np
import pytest

import ds4mlx as ds
from ds4mlx.config import Settings
from ds4mlx.errors import CheckpointError, ModelFileError, UsageError

GREEDY = ds.Sampling(temperature=0)
PAIRS = [("The river is warm", "The river is cold"), ("A warm day", "A cold day"), ("They felt warm", "They felt cold")]
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def built(model):
    return ds.directions(model, PAIRS)


def logprobs(model, steering, decoded=False):
    """Of the token after the prompt, which is read in a chunk or, its last token, in a step of decoding."""
    with model.session(steering=steering) as session:
        session.read(PROMPT[:-1] if decoded else PROMPT)
        if decoded:
            session.complete(max_tokens=2, sampling=ds.Sampling(logit_bias={PROMPT[-1]: 1e9}, temperature=0)).wait()
            session._settle()
            z = session._state.logits()
        else:
            z = session.logits()
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def shape(model):
    return model.layers, model.config.hidden_size


@pytest.mark.parametrize("steering", [
    lambda shape, v: ds.Steering(np.zeros(shape, np.float32), attn=1, ffn=1),
    lambda shape, v: ds.Steering(v, attn=0, ffn=0)], ids=["direction", "strength"])
def test_zero_is_bit_identical(model, built, steering):
    zero = steering(shape(model), built.vectors)
    np.testing.assert_array_equal(logprobs(model, zero), logprobs(model, None))
    np.testing.assert_array_equal(logprobs(model, zero, decoded=True), logprobs(model, None, decoded=True))


def test_directions_are_unit_vectors_of_every_layer(model, built):
    assert built.vectors.shape == shape(model) and built.vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(built.vectors, axis=-1), 1, atol=1e-6)


@pytest.mark.parametrize("part", ["attn", "ffn"])
def test_strength_one_takes_all_that_lies_along_the_direction_away(model, built, part):
    steering = ds.Steering(built.vectors, **{"attn": 0.0, "ffn": 0.0, part: 1.0})
    with model.session(steering=steering) as session:
        session.read(PROMPT)
        for i, layer in session.taps().layers.items():
            along = getattr(layer, part) @ built.vectors[i]
            np.testing.assert_allclose(along, 0, atol=1e-4 * np.abs(getattr(layer, part)).max())


def test_decoding_steers_as_prefill_does(model, built):
    strong = ds.Steering(built.vectors, attn=2, ffn=2)
    np.testing.assert_allclose(logprobs(model, strong, decoded=True), logprobs(model, strong), atol=1e-3)
    assert np.abs(logprobs(model, strong) - logprobs(model, None)).max() > 0.05


def test_a_file_brings_the_same_directions_back(model, built, tmp_path):
    built.write(tmp_path / "warm.f32")
    again = ds.Steering.read(tmp_path / "warm.f32", *shape(model))
    np.testing.assert_array_equal(again.vectors, built.vectors)
    with pytest.raises(ModelFileError, match="directions of"):
        ds.Steering.read(tmp_path / "warm.f32", model.layers + 1, shape(model)[1])


def test_sessions_are_steered_each_in_its_own_way(model, built):
    with model.session(steering=built) as steered, model.session() as plain:
        steered.read(PROMPT), plain.read(PROMPT)
        for session in (steered, plain, steered, plain):
            session.complete(max_tokens=2, sampling=GREEDY).wait()
        with model.session() as alone:
            alone.read(PROMPT)
            alone.complete(max_tokens=4, sampling=GREEDY).wait()
            assert plain.tokens == alone.tokens


def test_a_steered_state_is_no_plain_session_s(model, built, tmp_path):
    with model.session(steering=built) as steered, model.session() as plain:
        steered.read(PROMPT)
        steered.save(tmp_path / "warm.kvm")
        with pytest.raises(CheckpointError, match="another model"):
            plain.load(tmp_path / "warm.kvm")


def test_settings_steer_the_engine_and_its_saved_states_are_apart(tiny_path, model, built, tmp_path):
    from ds4mlx.engine.open import open_engine
    built.write(tmp_path / "warm.f32")
    settings = Settings(model=tiny_path, ctx=256, dir_steering_file=tmp_path / "warm.f32", dir_steering_ffn=-3)
    engine = open_engine(settings)
    session = engine.open(256)
    engine.prefill(session, PROMPT)
    with model.session(steering=ds.Steering(built.vectors, ffn=-3)) as same:
        same.read(PROMPT)
        np.testing.assert_array_equal(session.logits(), same.logits())
    assert engine.info.base != model.info.base and engine.info.fingerprint != model.info.fingerprint
    engine.close()


def test_an_engine_that_cannot_be_steered_says_so(tiny_path):
    from ds4mlx.engine.open import open_engine
    with pytest.raises(UsageError, match="cannot be steered"):
        open_engine(Settings(model=tiny_path, engine="stub", dir_steering_file=tiny_path))


def test_a_built_direction_moves_the_targeted_log_probabilities(model):
    """Prompts that were not built from; targets are the tokens that the first word favours most over the second."""
    pairs = [(f"{start} river", f"{start} stone") for start in ("The", "A", "My", "One", "That old", "Her", "A long")]
    directions = ds.directions(model, pairs)
    plain, other = (next_logprobs(model, text, None) for text in ("Our river", "Our stone"))
    targets = np.argsort(plain - other)[-5:]

    def moved(vectors, strength):
        steered = next_logprobs(model, "Our river", ds.Steering(vectors, ffn=strength))
        return (steered - plain)[targets].mean()

    away, added = moved(directions.vectors, 1.0), moved(directions.vectors, -1.0)
    noise = np.random.default_rng(5).standard_normal(shape(model)).astype(np.float32)
    noise /= np.linalg.norm(noise, axis=-1, keepdims=True)
    assert away < -1 and added > 0.5        # nats; -3.1 and 1.3 were measured
    assert abs(moved(noise, 1.0)) < 0.5     # a direction of no meaning


def next_logprobs(model, text, steering):
    with model.session(steering=steering) as session:
        session.read([model.tokenizer.bos, *model.tokenizer.encode_literal(text)])
        z = session.logits().astype(np.float64)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())
