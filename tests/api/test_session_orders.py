"""Whatever a session went through, it is in the state that its tokens make."""
import numpy as np
import pytest

import ds4mlx as ds

STEPS = 12


def after(model, session, rng):
    """One thing done to the session; returns the session to go on with."""
    match rng.integers(6):
        case 0:
            session.read(rng.integers(20, 400, rng.integers(1, 40)).tolist())
        case 1:
            session.complete("and the river ", max_tokens=int(rng.integers(1, 5))).wait()
        case 2:
            next(iter(session.chat("What?", thinking=bool(rng.integers(2)), max_tokens=6)), None)
        case 3 if session.tokens:
            session.rewind(int(rng.integers(len(session.tokens) + 1)))
        case 4:
            return session.fork()
        case 5 if session.tokens:
            session.taps(-1)
    return session


@pytest.mark.parametrize("seed", range(4))
def test_the_state_is_that_of_the_tokens(model, seed):
    rng, session = np.random.default_rng(seed), model.session()
    for _ in range(STEPS):
        session = after(model, session, rng)
        session.text    # decodes whatever there is
    session.read([7])
    with model.session() as fresh:
        fresh.read(session.tokens)
        # 1e-2: rows are rounded to FP8, and where one lies on an edge, chunks that are cut elsewhere round it apart.
        np.testing.assert_allclose(session.logits(), fresh.logits(), atol=1e-2)


@pytest.mark.parametrize("seed", range(2))
def test_messages_and_tokens_never_part(model, seed):
    """After any cut the next prompt says what a fresh session makes of the same messages, perhaps in other tokens."""
    rng, session = np.random.default_rng(seed), model.session()
    for question in ("One?", "Two?", "Three?"):
        session.chat(question, thinking=False, max_tokens=4, sampling=ds.Sampling(seed=seed)).wait()
        session.rewind(int(rng.integers(1, len(session.tokens) + 1)))
        if session.messages and session.messages[-1]["role"] == "user":
            session.messages.pop()
    session.chat("Four?", thinking=False, max_tokens=1)
    assert session.text == model.render(session.messages, thinking=False).text
