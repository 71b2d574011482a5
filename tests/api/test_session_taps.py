"""Taps as a session gives them; what they say is held against another implementation in tests/models/test_taps.py."""
import numpy as np
import pytest

import ds4mlx as ds


def test_taps_are_of_the_tokens_that_were_asked_for(session):
    session.complete("The river begins in the hills", max_tokens=5).wait()
    taps = session.taps(2, -1)
    assert taps.start == 2 and taps.tokens.tolist() == session.tokens[2:-1]
    assert set(taps.layers) == set(range(len(taps.layers)))
    assert all(len(layer.streams) == len(taps.tokens) == len(layer.experts) for layer in taps.layers.values())


def test_layers_can_be_chosen(session):
    session.read(range(40, 60))
    assert list(session.taps(0, 4, layers=[1, 3]).layers) == [1, 3]


def test_a_generated_token_s_log_probability_is_the_tap_s(session):
    answer = session.complete("The river", max_tokens=6).wait()
    logprobs = session.taps(-7, -1).logprobs
    found = np.take_along_axis(logprobs, np.array(answer.tokens)[:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(found, [step.logprob for step in answer.steps], atol=1e-3)  # in a step, and in a chunk


def test_the_lens_on_the_last_layer_is_the_model_s_own_answer(session, model):
    session.read(range(40, 60))
    taps = session.taps(3, 9)
    found = model.lens(taps.layers[model.layers - 1].streams)
    np.testing.assert_allclose(found, taps.logits, atol=1e-4)   # the last mix in one pass or two
    assert np.abs(model.lens(taps.layers[0].streams) - taps.logits).max() > 0.1


def test_a_tapped_session_goes_on_as_before(session, model):
    session.read(range(40, 80))
    with model.session() as other:
        other.read(range(40, 80))
        session.taps()
        greedy = ds.Sampling(temperature=0)
        assert (session.complete(max_tokens=5, sampling=greedy).wait().tokens
                == other.complete(max_tokens=5, sampling=greedy).wait().tokens)


@pytest.mark.parametrize("cut", [(0, 0), (5, 3), (20, None)])
def test_an_empty_slice_is_refused(session, cut):
    session.read(range(40, 60))
    with pytest.raises(ValueError, match="is empty"):
        session.taps(*cut)
