"""What every engine promises of its sessions and steps (engine.protocol). A test file of an engine imports all of this
and gives the fixture `engine`, open for 4,096 tokens."""
from dataclasses import replace

import numpy as np
import pytest
from state import whole

from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.errors import CheckpointError

GREEDY = Sampling(temperature=0.0)
PROMPT = [7, 40, 41, 300, 12, 99, 5, 6, 7, 8, 9]


@pytest.fixture
def session(engine):
    session = engine.open(4096)
    engine.prefill(session, PROMPT)
    yield session
    session.close()


def generate(engine, session, count, sampling=GREEDY, **row):
    """Token ids of `count` steps. The last one is not in the session."""
    out, last = [], None
    for _ in range(count):
        (step,), = engine.decode([Row(session, sampling, last, tuple(out), **row)])
        last = step.token
        out.append(last)
    return out


def test_the_session_covers_what_was_fed_and_not_the_last_sampled_token(engine, session):
    assert session.tokens == PROMPT + generate(engine, session, 3)[:-1]


def test_a_seed_decides_the_tokens(engine):
    runs = []
    for seed in (1, 1, 2):
        session = engine.open(4096)
        engine.prefill(session, PROMPT)
        runs.append(generate(engine, session, 8, Sampling(seed=seed)))
    assert runs[0] == runs[1] != runs[2]


def test_logprobs_are_those_of_the_plain_distribution(engine, session):
    logits = session.logits().astype(np.float64)
    (step,), = engine.decode([Row(session, replace(GREEDY, top_logprobs=3, logit_bias={9: 100.0}))])
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert step.token == 9 and step.logprob == pytest.approx(logprobs[9], abs=1e-4)
    assert [token for token, _ in step.top] == np.argsort(-logits)[:3].tolist()


def test_banned_and_masked_tokens_are_never_sampled(engine, session):
    first = int(session.logits().argmax())
    second = int(np.argsort(-session.logits())[1])
    assert generate(engine, session, 1, replace(GREEDY, banned=frozenset({first}))) == [second]
    mask = np.zeros(engine.info.vocab, bool)
    mask[[3, 17]] = True
    assert generate(engine, session, 1, mask=mask)[0] in (3, 17)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_every_token_banned_there_is_no_next_one(temperature, engine, session):
    nothing = Sampling(temperature=temperature, banned=frozenset(range(engine.info.vocab)))
    with pytest.raises(ValueError, match="every token is banned or masked"):
        engine.decode([Row(session, nothing)])
    assert session.tokens == PROMPT


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
                                     {"repetition_penalty": 50.0}])
def test_penalties_count_generated_tokens_only(penalty, engine, session):
    engine.prefill(session, [3])
    lead = {token: value - float(session.logits()[token]) for token, value in ((3, 50.0), (4, 49.0))}
    sampling = replace(GREEDY, logit_bias=lead, **penalty)
    (in_prompt,), (generated,) = (*engine.decode([Row(session, sampling)]),
                                  *engine.decode([Row(session, sampling, generated=(3,))]))
    assert (in_prompt.token, generated.token) == (3, 4)


def test_a_rewound_session_repeats_itself_exactly(engine, session):
    session.mark()
    first = generate(engine, session, 6)
    logits = session.logits()
    assert session.rewind(len(PROMPT) + 2) == len(PROMPT)
    assert generate(engine, session, 6) == first
    np.testing.assert_array_equal(session.logits(), logits)


def test_without_a_mark_a_rewind_goes_to_the_start(engine, session):
    assert session.rewind(4) == 0 and session.tokens == []
    engine.prefill(session, PROMPT)
    assert session.tokens == PROMPT


def test_marks_thin_out_but_the_first_and_the_last_stay(engine):
    session = engine.open(4096)
    for i in range(40):
        engine.prefill(session, [5 + i])
        session.mark()
    assert session.rewind(39) == 39 and session.rewind(1) == 1


def test_a_saved_state_goes_on_with_the_same_tokens(engine, session):
    other = engine.open(4096)
    other.restore(whole(session))
    assert other.tokens == session.tokens and generate(engine, other, 5) == generate(engine, session, 5)


def test_a_state_has_the_arrays_that_the_engine_names(engine, session):
    found = {name: (a.shape, a.dtype) for name, a in whole(session).items()}
    assert found == dict(engine.arrays(len(session.tokens)))


def test_spans_hold_the_rows_of_their_tokens_whatever_comes_after(engine):
    short, long = engine.open(8192), engine.open(8192)
    for session, end in ((short, 2048), (long, 4500)):
        for at in range(0, end, 2048):
            engine.prefill(session, [7 + i % 90 for i in range(at, min(at + 2048, end))])
    first, again = short.snapshot().span(0), long.snapshot().span(0)
    assert first.keys() == again.keys() and all(np.array_equal(first[name], again[name]) for name in first)
    one, many = whole(long, spans=0), whole(long, spans=2)
    assert all(np.array_equal(one[name], many[name]) for name in one)


def test_a_snapshot_holds_while_the_session_goes_on(engine, session):
    snapshot, expected = session.snapshot(), whole(session)
    generate(engine, session, 9)
    assert all(np.array_equal(expected[name], array) for name, array in snapshot.head(0).items())


def test_a_snapshot_of_what_the_session_has_left_is_refused(engine, session):
    generate(engine, session, 3)
    snapshot = session.snapshot()
    session.rewind(len(PROMPT))
    with pytest.raises(CheckpointError, match="has gone back"):
        snapshot.head(0)


@pytest.mark.parametrize("damage", [lambda a: a.pop("logits"), lambda a: a.update(tokens=a["tokens"][:-1]),
                                    lambda a: a.update(logits=a["logits"] * np.inf)])
def test_a_damaged_state_is_refused_and_changes_nothing(damage, engine, session):
    arrays, before = whole(session), list(session.tokens)
    damage(arrays)
    with pytest.raises(CheckpointError):
        session.restore(arrays)
    assert session.tokens == before and len(generate(engine, session, 2)) == 2


def test_a_state_larger_than_the_context_is_refused(engine, session):
    with pytest.raises(CheckpointError, match=f"covers {len(PROMPT)} tokens"):
        engine.open(4).restore(whole(session))


def test_tokens_past_the_context_or_the_vocabulary_are_refused(engine, session):
    with pytest.raises(ValueError, match="context is 4096"):
        engine.prefill(session, [5] * 4096)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.prefill(session, [engine.info.vocab])
    assert session.tokens == PROMPT
