import numpy as np
import pytest
from engine_claims import *  # noqa: F403, claims about every engine are tests here
from engine_claims import GREEDY, PROMPT, generate
from small_model import CONFIG
from state import whole

from ds4mlx import ops
from ds4mlx.config import Settings
from ds4mlx.engine import mlx_memory
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.engine.mlx_sampling import uniform
from ds4mlx.engine.mlx_session import MLXSession
from ds4mlx.engine.protocol import MemoryPlan, Row
from ds4mlx.errors import DoesNotFit
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.pages import SequenceRows


@pytest.fixture(scope="module")
def engine(tiny_path):
    engine = open_mlx(Settings(ctx=4096), tiny_path)
    yield engine
    engine.close()


def test_greedy_decoding_takes_the_largest_logit_of_a_fresh_prefill(engine, session):
    tokens = generate(engine, session, 5)
    fresh = engine.open(4096)
    for i, token in enumerate(tokens):
        engine.prefill(fresh, PROMPT if i == 0 else [tokens[i - 1]])
        assert token == fresh.logits().argmax()


def test_the_uniform_of_a_step_depends_on_nothing_but_seed_and_step():
    assert uniform(3, 5) == uniform(3, 5) and len({uniform(s, i) for s in range(4) for i in range(4)}) == 16
    assert 0 <= uniform(2 ** 64 - 1, 10) < 1


def test_layers_that_begin_early_give_the_same(engine):
    sessions = [MLXSession(engine._model, 600, early=early) for early in (False, True)]
    for session in sessions:
        session.feed(list(range(10, 310)))
        session.feed(list(range(20, 120)))
    np.testing.assert_array_equal(*(session.logits() for session in sessions))


@pytest.mark.parametrize("most", [1, 2, 3, 5, 16])
def test_no_more_marks_are_kept_than_asked_for_and_their_distances_grow_going_back(most, tiny_path):
    engine = open_mlx(Settings(ctx=1024, kv_rewind_points=most), tiny_path)
    session = engine.open(1024)
    for i in range(60):
        engine.prefill(session, [5 + i])
        session.mark()
    gaps = [b - a for a, b in zip(session.marks, session.marks[1:])]
    engine.close()
    assert len(session.marks) == most and session.marks[-1] == 60
    assert most < 3 or (session.marks[0], session.marks[-2]) == (1, 59)
    assert most < 5 or max(gaps[:most // 2]) > max(gaps[most // 2:])


def test_a_failure_in_the_middle_of_the_layers_leaves_the_session_as_it_was(engine, session, monkeypatch):
    expected, calls = generate(engine, session, 5), iter([ops.expert_down] * 3)
    assert session.rewind(0) == 0
    engine.prefill(session, PROMPT)
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(ops, "expert_down", lambda *args, **rest: next(calls)(*args, **rest))
        engine.prefill(session, list(range(200)))
    assert session.tokens == PROMPT and generate(engine, session, 5) == expected


def test_a_state_that_finds_no_memory_leaves_an_empty_session(small, monkeypatch):
    state, session, held = whole(small.base(2043)), small.prefilled([5] * 77), small.pools.pages.held
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        calls, real = iter([True]), SequenceRows.write
        patch.setattr(SequenceRows, "write", lambda *args: real(*args) if next(calls, False) else exhausted())
        session.restore(state)
    assert session.tokens == session.marks == session.table.entries == [] and small.pools.pages.held == held - 1
    session.feed([5] * 77)
    np.testing.assert_array_equal(session.logits(), small.prefilled([5] * 77).logits())


def exhausted():
    raise MemoryError


def test_what_does_not_fit_is_refused_with_the_numbers(tiny_path):
    with pytest.raises(DoesNotFit, match=r"context of 32768 tokens needs .* the limit is 0\.0 GB; use a smaller model"):
        open_mlx(Settings(memory_limit_gb=0.01), tiny_path)


@pytest.mark.parametrize("limit, advice", [
    (420_000, "use --batched-session 3 or --ctx 24576, or raise"), (91_000, "use --ctx 4096, or raise"),
    (30_000, "use a smaller model: 1024 tokens of context do not fit, or raise")])
def test_a_refusal_names_the_most_that_fits(limit, advice):
    def plan(context, sessions):
        return MemoryPlan(25_000, 4 * context, sessions, 0, limit)

    with pytest.raises(DoesNotFit, match=advice):
        mlx_memory.require(plan(32768, 4), 32768, plan)
    assert plan(32768, 3).fits == plan(24576, 4).fits == (limit == 420_000) and plan(4096, 4).fits == (limit > 30_000)


def test_the_engine_tells_what_its_arrays_take(engine, session):
    engine.prefill(session, PROMPT)
    assert 0 < engine.memory().active_bytes <= engine.memory().peak_bytes


def test_the_plan_grows_with_context_and_sessions(engine):
    small, large = engine.plan(1024, 1), engine.plan(8192, 3)
    assert small.fits and small.weights_bytes == large.weights_bytes
    assert large.total_bytes - large.scratch_bytes > small.total_bytes - small.scratch_bytes + 2 * small.session_bytes


@pytest.mark.skipif(ops.device() != "cpu", reason="GPUs round each of a tiny state's many small arrays up to pages")
@pytest.mark.parametrize("context, count", [(130, 1), (700, 2), (2100, 4)])
def test_full_sessions_with_all_their_marks_hold_no_more_than_planned(context, count, tiny_path):
    import mlx.core as mx
    engine = open_mlx(Settings(ctx=4096), tiny_path)
    before, sessions = mx.get_active_memory(), [engine.open(context) for _ in range(count)]
    for session in sessions:
        for _ in range(20):
            engine.prefill(session, [7] * ((context - 3) // 20))
            session.mark()
        engine.prefill(session, [7] * ((context - 3) % 20))
    mx.reset_peak_memory()
    said = [[9]] * count
    for _ in range(3):      # to the last token: all are in one stack then
        rows = [Row(session, GREEDY, one[-1], (9,)) for session, one in zip(sessions, said)]
        said = [[step.token for step in steps] for steps in engine.decode(rows)]
    plan, held = engine.plan(context, count), mx.get_active_memory() - before
    engine.close()
    assert 0.3 * count * plan.session_bytes < held < count * plan.session_bytes
    assert mx.get_peak_memory() - before < plan.total_bytes - plan.weights_bytes


@pytest.mark.skipif(ops.device() != "cpu", reason="GPUs round each of a small state's many arrays up to pages")
def test_a_mark_behind_a_long_slice_keeps_no_more_of_it_than_its_window(small):
    import mlx.core as mx
    session, held = small.open(), []
    for _ in range(4):      # of one page, so that no pool grows behind the first
        session.feed([7] * 500)
        session.mark()
        held.append(mx.get_active_memory())
    session.close()
    assert max(np.diff(held)) <= schema.mark_bytes(CONFIG, packed=False)


def test_one_session_more_than_fits_is_refused(engine, tiny_path):
    limited = open_mlx(Settings(ctx=4096, memory_limit_gb=engine.plan(4096, 2).total_bytes / 1e9 + 1e-6), tiny_path)
    first, second = limited.open(4096), limited.open(4096)
    with pytest.raises(DoesNotFit, match="one more session needs .* close a session first"):
        limited.open(4096)
    first.close()
    assert limited.open(4096).tokens == second.tokens == []
    limited.close()


def test_live_buffers_stay_bounded_while_decoding(engine, session):
    import mlx.core as mx
    generate(engine, session, 5)
    before = mx.get_active_memory()
    generate(engine, session, 60)
    assert mx.get_active_memory() - before < 4e6  # rows grow in steps of 256; a kept graph would hold 60 steps
