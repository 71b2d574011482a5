"""The scripted engine keeps the engine protocol, so that what is tested on it holds for real engines."""

import numpy as np
import pytest
from state import whole

from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.engine.stub import StubEngine
from ds4mlx.errors import CheckpointError

GREEDY = Sampling(temperature=0.0)


def answer(engine, session, sampling=GREEDY, steps=8):
    """Ids decoded after a prefill, until EOS or `steps`."""
    generated = []
    while len(generated) < steps and engine.eos not in generated:
        row = Row(session, sampling, generated[-1] if generated else None, generated)
        generated.append(engine.decode([row])[0][0].token)
    return generated


def test_the_answer_is_the_script_then_eos():
    engine = StubEngine(lambda prompt: [7, 8, len(prompt)])
    session = engine.open(64)
    engine.prefill(session, [3, 4])
    assert answer(engine, session, Sampling(temperature=1.0)) == [7, 8, 2, engine.eos]


def test_the_last_sampled_token_is_not_in_the_session_yet():
    engine = StubEngine(lambda prompt: [7, 8, 9])
    session = engine.open(64)
    engine.prefill(session, [3, 4])
    answer(engine, session, steps=3)
    assert session.tokens == [3, 4, 7, 8]


def test_where_the_script_is_silent_the_seed_decides():
    engine = StubEngine(lambda prompt: [None] * 8)

    def run(seed):
        session = engine.open(64)
        engine.prefill(session, [3, 4])
        return answer(engine, session, Sampling(seed=seed, min_p=0.0))

    assert run(5) == run(5)
    assert len({tuple(run(seed)) for seed in range(8)}) == 8  # 512 tokens, 8 steps: a tie has chance 1e-20


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40])
def test_next_to_no_temperature_is_the_argmax(temperature):
    engine = StubEngine(lambda prompt: [None] * 5)

    def run(temperature):
        session = engine.open(64)
        engine.prefill(session, [3, 4])
        return answer(engine, session, Sampling(temperature=temperature, min_p=0.0))

    assert run(temperature) == run(0.0)


def test_a_banned_token_gives_way_to_the_next_best():
    engine = StubEngine(lambda prompt: [7])
    session = engine.open(64)
    engine.prefill(session, [3])
    step = engine.decode([Row(session, Sampling(temperature=0.0, banned=frozenset({7}), top_logprobs=2))])[0][0]
    assert step.top[0][0] == 7 and step.token == step.top[1][0]


def test_interleaved_rows_equal_solo_runs():
    engine = StubEngine(lambda prompt: [None] * 5)
    sessions = [engine.open(64), engine.open(64)]
    for session, prompt in zip(sessions, ([3, 4], [5, 6, 7])):
        engine.prefill(session, prompt)
    together = [[], []]
    for _ in range(5):
        rows = [Row(s, Sampling(min_p=0.0), g[-1] if g else None, g) for s, g in zip(sessions, together)]
        for generated, steps in zip(together, engine.decode(rows)):
            generated.append(steps[0].token)
    alone = engine.open(64)
    engine.prefill(alone, [5, 6, 7])
    assert answer(engine, alone, Sampling(min_p=0.0), steps=5) == together[1]


def test_rewinding_reaches_the_nearest_mark_below():
    engine = StubEngine()
    session = engine.open(64)
    engine.prefill(session, [1, 2, 3])
    session.mark()
    engine.prefill(session, [4, 5])
    assert session.rewind(4) == 3 and session.tokens == [1, 2, 3]
    assert session.rewind(2) == 0 and session.tokens == []


def test_a_saved_session_goes_on_where_it_was():
    engine = StubEngine(lambda prompt: [None] * 4)
    session, copy = engine.open(64), engine.open(64)
    engine.prefill(session, [3, 4, 5])
    copy.restore(whole(session))
    assert copy.tokens == [3, 4, 5] and answer(engine, copy) == answer(engine, session)


def test_another_state_is_refused_and_leaves_the_session_as_it_was():
    engine = StubEngine()
    session = engine.open(64)
    engine.prefill(session, [3])
    with pytest.raises(CheckpointError, match="not a state of the stub: it holds rows"):
        session.restore({"rows": np.zeros(3)})
    assert session.tokens == [3]
