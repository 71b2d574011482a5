"""Sessions and steps of the CUDA engine, on the tiny model."""
from concurrent.futures import ThreadPoolExecutor

import cupy as cp
import numpy as np
import pytest
from engine_claims import *  # noqa: F403, claims about every engine are tests here
from engine_claims import GREEDY, PROMPT, generate
from state import whole

from ds4mlx.config import Settings
from ds4mlx.cuda_port import ops
from ds4mlx.cuda_port.engine import open_cuda
from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.errors import DoesNotFit

NEAR = 2e-3     # of logits of deviation 1.5: products of one token and of several round differently


@pytest.fixture(scope="module")
def engine(tiny_path):
    engine = open_cuda(Settings(ctx=4096, quality=True, kv_round="none", batched_session=4), tiny_path)
    yield engine
    engine.close()


def text(n, seed=3):
    return np.random.default_rng(seed).integers(5, 4000, n).tolist()


def force(engine, sessions, tokens):
    """Feed each session its own tokens, all sessions in one step."""
    for at in zip(*tokens):
        engine.decode([Row(s, GREEDY, token) for s, token in zip(sessions, at)])


@pytest.mark.parametrize("start", [1, 127, 255, 300, 2044])
def test_cuda_steps_go_on_where_a_chunk_ended(start, engine):
    ids, stepped, chunked = text(start + 9), engine.open(4096), engine.open(4096)
    engine.prefill(stepped, ids[:start])
    force(engine, [stepped], [ids[start:]])
    engine.prefill(chunked, ids)
    np.testing.assert_allclose(stepped.logits(), chunked.logits(), atol=NEAR)


def test_cuda_rows_together_are_rows_alone(engine):
    lengths = [3, 130, 700, 2045]
    together, alone = ([engine.open(4096) for _ in lengths] for _ in range(2))
    for n, *pair in zip(lengths, together, alone):
        for session in pair:
            engine.prefill(session, text(n, seed=n))
    rest = [text(6, seed=n + 1) for n in lengths]
    force(engine, together, rest)
    for session, tokens in zip(alone, rest):
        force(engine, [session], [tokens])
    for a, b in zip(together, alone):
        np.testing.assert_allclose(a.logits(), b.logits(), atol=NEAR)


def test_cuda_rows_join_and_leave(engine):
    a, b, expected = (engine.open(4096) for _ in range(3))
    for s in (a, b, expected):
        engine.prefill(s, PROMPT)
    force(engine, [a], [[5, 6]])
    force(engine, [b, a], [[5, 6], [7, 8]])
    force(engine, [a], [[9]])
    force(engine, [expected], [[5, 6, 7, 8, 9]])
    np.testing.assert_allclose(a.logits(), expected.logits(), atol=NEAR)
    assert a.tokens == expected.tokens == PROMPT + [5, 6, 7, 8, 9]


def test_cuda_another_token_than_the_one_run_ahead_with(engine, session):
    generate(engine, session, 4)
    tokens, other = list(session.tokens), engine.open(4096)
    force(engine, [session], [[17]])
    engine.prefill(other, tokens + [17])
    np.testing.assert_allclose(session.logits(), other.logits(), atol=NEAR)


def test_cuda_with_every_token_banned_nothing_advances(engine, session):
    first = generate(engine, session, 1)[0]
    nothing = Sampling(banned=frozenset(range(engine.info.vocab)))
    before = session.logits()
    with pytest.raises(ValueError, match="every token is banned or masked"):
        engine.decode([Row(session, nothing, first, (first,))])
    assert session.tokens == PROMPT and np.array_equal(session.logits(), before)


def test_cuda_a_failed_chunk_leaves_the_session_as_it_was(engine, session, monkeypatch):
    expected, calls = generate(engine, session, 5), iter([ops.experts] * 3)
    assert session.rewind(0) == 0
    engine.prefill(session, PROMPT)
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(ops, "experts", lambda *args, **rest: next(calls)(*args, **rest))
        engine.prefill(session, text(200))
    assert session.tokens == PROMPT and generate(engine, session, 5) == expected


@pytest.mark.parametrize("n", [3, 4, 5, 127, 128, 129, 132, 256, 2048, 2600])
@pytest.mark.parametrize("kv_round", ["none", "official"])
def test_cuda_a_saved_state_goes_on_as_it_would_have(n, kv_round, tiny_path):
    engine = open_cuda(Settings(ctx=4096, kv_round=kv_round), tiny_path)
    session, other = engine.open(4096), engine.open(4096)
    engine.prefill(session, text(n))
    other.restore(whole(session))
    assert {name: (a.shape, a.dtype) for name, a in whole(other).items()} == dict(engine.arrays(n))
    tokens = text(5, seed=n)
    force(engine, [session], [tokens])
    force(engine, [other], [tokens])
    np.testing.assert_array_equal(session.logits(), other.logits())
    engine.close()


def test_cuda_a_branch_goes_on_beside_the_session_it_came_from(engine):
    a, b, c = (engine.open(4096) for _ in range(3))
    engine.prefill(a, text(2500))
    a.mark()
    force(engine, [a], [[5, 6, 7]])
    assert b.branch(a, 2501) == 2500 and b.tokens == a.tokens[:2500] and b.marks == [2500]
    force(engine, [a, b], [[8, 9], [10, 11]])
    engine.prefill(c, b.tokens)
    np.testing.assert_allclose(b.logits(), c.logits(), atol=NEAR)
    c.rewind(0)
    engine.prefill(c, a.tokens)
    np.testing.assert_allclose(a.logits(), c.logits(), atol=NEAR)


def test_cuda_a_branch_where_there_is_no_mark_is_empty(engine, session):
    other = engine.open(4096)
    engine.prefill(other, [5, 6])
    assert other.branch(session, 4) == 0 and other.tokens == []


def test_cuda_engines_of_two_threads_work_in_memory_of_their_own(tiny_path):
    def apart(_):
        engine = open_cuda(Settings(ctx=4096), tiny_path)
        session = engine.open(4096)
        engine.prefill(session, text(900))
        tokens = generate(engine, session, 40)
        engine.close()
        return tokens
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(apart, range(2))) == 2 * [apart(0)]


def test_cuda_closed_sessions_leave_no_page_behind(engine):
    def free():
        return len(engine._arena._free_pages), len(engine._arena._free_slots)
    before, a, b = free(), engine.open(4096), engine.open(4096)
    engine.prefill(a, text(2500))
    a.mark()
    b.branch(a, 2500)
    force(engine, [a, b], [[5], [6]])
    a.close()
    b.close()
    assert free()[1] == before[1] and free()[0] >= before[0]


def test_cuda_what_does_not_fit_is_refused_with_the_numbers(tiny_path):
    with pytest.raises(DoesNotFit, match=r"context of 32768 tokens needs .* GB are to be had; use a smaller --ctx"):
        open_cuda(Settings(memory_limit_gb=0.01), tiny_path)


def test_cuda_steps_take_no_more_memory_as_they_go_on(engine, session):
    generate(engine, session, 5)
    before = cp.get_default_memory_pool().used_bytes()
    generate(engine, session, 60)
    assert cp.get_default_memory_pool().used_bytes() - before < 1e6
