"""Rows that decode together say what each would say alone, however they come and go."""
import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from small_model import CONFIG
from state import whole
from talks import GREEDY, LENGTHS, Talk, bench

from ds4mlx import ops
from ds4mlx.engine import mlx_decode
from ds4mlx.engine.protocol import Sampling

LIMIT = 2e-5    # in logits of deviation 1: float32, where products of more rows may add in another order
COUNT = 8       # tokens that a session says


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("turn", [1, -1], ids=["forward", "reversed"])
def test_every_row_says_what_it_says_alone(rows, turn, small):
    talks = [Talk(small.branch(length)) for length in LENGTHS[-rows:]][::turn]
    for _ in range(COUNT):
        small.step(talks)
    for talk, length in zip(talks[::turn], LENGTHS[-rows:]):
        said, logits = small.alone(length, COUNT)
        assert talk.said == said
        np.testing.assert_allclose(talk.session.logits(), logits, atol=LIMIT)


def test_steps_leave_the_state_that_a_prefill_of_the_same_tokens_leaves(small):
    talks = [Talk(small.branch(length)) for length in (1, 13, 122, 2043)]
    for _ in range(12):     # over the end of a page, and the first row of ratio 4 behind it
        small.step(talks)
    for talk in talks:
        stepped, prefilled = whole(talk.session), whole(small.prefilled(talk.session.tokens))
        for name in prefilled:
            np.testing.assert_allclose(stepped[name], prefilled[name], atol=LIMIT, err_msg=name)


def schedule(bench, rng, most_rows, steps=4):
    """Rows that join, stay away for a step, come back and change places at random. Says which were wrong."""
    lengths = rng.choice(LENGTHS, rng.integers(1, most_rows + 1)).tolist()
    talks = [Talk(bench.branch(length)) for length in lengths]
    for _ in range(steps):
        order = rng.permutation(len(talks))[:rng.integers(1, len(talks) + 1)]
        bench.step([talks[i] for i in order])
    wrong = [length for talk, length in zip(talks, lengths)
             if talk.said != bench.alone(length, COUNT)[0][:len(talk.said)]]
    for talk in talks:
        talk.session.close()
    return wrong


def test_a_thousand_random_schedules_change_no_token(small):
    assert [seed for seed in range(1000) if schedule(small, np.random.default_rng(seed), 4)] == []


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_of_up_to_16_rows_change_no_token(seed, small):
    assert schedule(small, np.random.default_rng(seed), 16, steps=COUNT) == []


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2000, 5000, 100))
def test_many_more_schedules_of_16_rows(seed, small):
    assert [s for s in range(seed, seed + 100) if schedule(small, np.random.default_rng(s), 16, steps=COUNT)] == []


@pytest.mark.parametrize("seed", range(10))
def test_steps_begun_ahead_change_no_token_in_random_schedules(seed):
    with ops.only("reference"):
        assert schedule(bench(lookahead=True), np.random.default_rng(seed), 4, steps=6) == []


@pytest.mark.parametrize("rounding", ["none", "official"])
def test_with_and_without_lookahead_every_bit_is_the_same(rounding):
    logits = []
    for lookahead in (False, True):
        with ops.only("reference"):
            small = bench(rounding, lookahead)
            talks = [Talk(small.branch(length)) for length in (3, 15, 122, 2043)]
            for _ in range(COUNT):
                small.step(talks)
            logits.append(np.stack([talk.session.logits() for talk in talks]))
    np.testing.assert_array_equal(*logits)


def test_what_was_begun_ahead_serves_the_rows_that_stay(monkeypatch):
    small, passes = bench(lookahead=True), []
    talks = [Talk(small.branch(length)) for length in (3, 15, 122)]
    small.step(talks)
    small.step(talks)
    forward = type(small.model).step
    monkeypatch.setattr(type(small.model), "step", lambda model, batch, layers: passes.append(batch.size)
                        or forward(model, batch, layers))
    small.step([talks[2], talks[0]])
    assert passes == [2]    # the one begun for the step after; its own was there
    assert [talk.said for talk in talks] == [small.alone(length, 3)[0][:len(talk.said)]
                                             for talk, length in zip(talks, (3, 15, 122))]


def test_nothing_is_begun_ahead_that_would_copy_large_pools(monkeypatch):
    small, reached = bench(lookahead=True), []
    monkeypatch.setattr(mlx_decode, "COPIED_BYTES", 0)
    talk, forward = Talk(small.branch(77)), type(small.model).step
    monkeypatch.setattr(type(small.model), "step", lambda model, batch, layers: reached.append(int(batch.positions[0]))
                        or forward(model, batch, layers))
    ends = [reached[-1] for _ in range(6) if small.step([talk]) and reached]
    assert ends == [78, 78, 80, 81, 82]     # the token at 79 completes a row of 4
    assert talk.said == small.alone(77, COUNT)[0][:6]


@pytest.mark.skipif(ops.device() != "cpu", reason="counts what the CPU allocates")
def test_a_step_writes_its_rows_in_place():
    small = bench()
    small.pools.pages._grow(200)    # 37 MB of rows
    talks = [Talk(small.branch(length)) for length in (126, 127)]
    small.step(talks)
    small.step(talks)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(4):
        small.step(talks)
    assert mx.get_peak_memory() - before < small.pools.pages.nbytes / 10


@pytest.mark.parametrize("lookahead", [False, True])
def test_sessions_are_marked_read_and_taken_back_between_steps(lookahead):
    small = bench(lookahead=lookahead)
    talks = [Talk(small.branch(length)) for length in (15, 127)]
    for _ in range(4):
        small.step(talks)
        for talk in talks:
            talk.session.mark()
    talk, other = talks
    assert talk.session.rewind(16) == 16 and talk.session.tokens[15:] == talk.said[:1]
    talk.said[1:] = [(talk.said[1] + 1) % CONFIG.vocab_size]
    small.step(talks)
    small.step(talks)
    stepped, prefilled = whole(talk.session), whole(small.prefilled(talk.session.tokens))
    for name in prefilled:
        np.testing.assert_allclose(stepped[name], prefilled[name], atol=LIMIT, err_msg=name)
    assert other.said == small.alone(127, 6)[0]


def test_a_session_that_stays_away_keeps_no_other_s_state_alive(small):
    talks = [Talk(small.branch(length)) for length in (15, 127)]
    for _ in range(2):
        small.step(talks)
    assert all(talk.session.place for talk in talks)
    small.step(talks[:1])
    assert talks[0].session.place and talks[1].session.place is None


def test_another_token_than_the_sampled_one_can_be_fed():
    small = bench(lookahead=True)
    talk, fresh = Talk(small.branch(34)), Talk(small.branch(34))
    for _ in range(2):
        small.step([talk])
    talk.said[-1] = fed = (talk.said[-1] + 1) % CONFIG.vocab_size
    small.step([talk])
    fresh.session.feed([talk.said[0], fed])
    small.step([fresh])
    assert talk.said[-1] == fresh.said[-1] and talk.session.tokens == fresh.session.tokens


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_seed_gives_a_row_the_same_tokens_in_any_company(lookahead):
    small = bench(lookahead=lookahead)
    hows = [Sampling(seed=1, min_p=0.0), GREEDY, Sampling(temperature=0.7, top_k=5, seed=2),
            Sampling(top_p=0.5, seed=3, repetition_penalty=1.3, logit_bias={4: 1.0}),
            Sampling(seed=4, presence_penalty=1.0, frequency_penalty=0.5, banned=frozenset({7, 9}))]
    talks = [Talk(small.branch(length), how) for length, how in zip(LENGTHS[5:], hows)]
    for _ in range(COUNT):
        small.step(talks)
    assert [t.said for t in talks] == [small.alone(n, COUNT, how)[0] for n, how in zip(LENGTHS[5:], hows)]


def any_way(rng):
    """A way to sample with everything in it, or not, and a mask or none."""
    biased, banned = rng.integers(0, CONFIG.vocab_size, (2, 4)).tolist()
    how = Sampling(temperature=rng.choice([0.0, 0.7, 1.3]), top_p=rng.choice([1.0, 0.8, 0.0]),
                   top_k=int(rng.choice([0, 3, 200])), min_p=rng.choice([0.0, 0.05]),
                   seed=2 ** 64 - int(rng.integers(1, 9)), banned=frozenset(banned[rng.integers(5):]),
                   logit_bias=dict.fromkeys(biased[rng.integers(5):], rng.normal()),
                   presence_penalty=rng.choice([0.0, 1.0]), frequency_penalty=rng.choice([0.0, 0.5]),
                   repetition_penalty=rng.choice([1.0, 1.3]), top_logprobs=int(rng.choice([0, 1, 20])))
    return how, rng.random(CONFIG.vocab_size) < 0.4 if rng.random() < 0.5 else None


@pytest.mark.parametrize("lookahead", [False, True])
def test_16_rows_are_sampled_each_in_its_own_way(lookahead):
    small, rng = bench(lookahead=lookahead), np.random.default_rng(3)
    ways = [any_way(rng) for _ in LENGTHS]
    talks = [Talk(small.branch(length), *way) for length, way in zip(LENGTHS, ways)]
    for _ in range(COUNT):
        steps = small.step(talks)
    assert [talk.said for talk in talks] == [small.alone(n, COUNT, *way)[0] for n, way in zip(LENGTHS, ways)]
    assert [len(step.top) for step in steps] == [how.top_logprobs for how, _ in ways]


def test_masks_hold_for_their_own_rows_only(small):
    mask = np.arange(CONFIG.vocab_size) % 5 == 2
    masks = [mask, None, ~mask]
    talks = [Talk(small.branch(length), mask=m) for length, m in zip((16, 30, 250), masks)]
    for _ in range(COUNT):
        small.step(talks)
    assert [talk.said for talk in talks] == [small.alone(n, COUNT, mask=m)[0] for n, m in zip((16, 30, 250), masks)]
    assert all(token % 5 == 2 for token in talks[0].said)


def test_alternatives_are_reported_to_the_rows_that_ask(small):
    talks = [Talk(small.branch(length), replace(GREEDY, top_logprobs=n)) for length, n in ((16, 0), (30, 3), (77, 1))]
    wanted = [talk.session.logits().astype(np.float64) for talk in talks]
    for step, logits, count in zip(small.step(talks), wanted, (0, 3, 1)):
        logprobs = logits - np.log(np.exp(logits).sum())
        assert [token for token, _ in step.top] == np.argsort(-logits)[:count].tolist()
        np.testing.assert_allclose([value for _, value in step.top], np.sort(logprobs)[::-1][:count], atol=1e-5)
        assert step.logprob == pytest.approx(logprobs[step.token], abs=1e-5)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("call", range(1, 9))
def test_a_failure_at_any_layer_leaves_all_sessions_as_they_were(call, lookahead, monkeypatch):
    small = bench(lookahead=lookahead)
    talks = [Talk(small.branch(length)) for length in (3, 127, 2043)]
    for _ in range(2):
        small.step(talks)
    real, calls = ops.expert_down, iter(range(call))
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(ops, "expert_down", lambda *args, **rest: next(calls) >= 0 and real(*args, **rest))
        for _ in range(4):
            before = [list(talk.session.tokens) for talk in talks]
            small.step(talks)
    assert [talk.session.tokens for talk in talks] == before
    for _ in range(2):
        small.step(talks)
    assert [talk.said for talk in talks] == [small.alone(n, len(talks[0].said))[0] for n in (3, 127, 2043)]


@pytest.mark.parametrize("change, complaint", [
    ({"mask": np.zeros(CONFIG.vocab_size, bool)}, "every token is banned"),
    ({"token": CONFIG.vocab_size}, "vocabulary has 128")])
def test_a_row_that_cannot_go_on_leaves_the_others_to_go_on_without_it(change, complaint, small):
    talks = [Talk(small.branch(length)) for length in (7, 128, 250)]
    small.step(talks)
    with pytest.raises(ValueError, match=complaint):
        small.decoder.decode([talks[0].row(), talks[1].row(**change), talks[2].row()])
    assert [len(talk.session.tokens) for talk in talks] == [7, 128, 250]
    small.step([talks[0], talks[2]])
    small.step(talks[1:2])
    assert [talk.said for talk in talks] == [small.alone(length, 2)[0] for length in (7, 128, 250)]


@pytest.mark.parametrize("tokens", [(None, None), (5, None), (5, 6)])
def test_a_session_takes_one_token_in_a_step(tokens, small):
    talk = Talk(small.branch(7))
    with pytest.raises(ValueError, match="there twice"):
        small.decoder.decode([talk.row(token=token) for token in tokens])
    assert len(talk.session.tokens) == 7


@pytest.mark.parametrize("token", [None, 5])
def test_a_session_that_is_closed_or_another_engine_s_is_refused(token, small):
    closed, foreign = Talk(small.branch(7)), Talk(bench().branch(7))
    closed.session.close()
    beside = Talk(small.branch(13))
    gc.collect()                                        # pages of sessions that tests before left
    for talk, complaint in ((closed, "closed"), (foreign, "another engine's")):
        held = small.pools.pages.held
        with pytest.raises(ValueError, match=complaint):
            small.decoder.decode([beside.row(), talk.row(token=token)])
        assert small.pools.pages.held == held


def test_a_session_that_was_closed_in_the_stack_leaves_the_others_to_go_on():
    small = bench(lookahead=True)
    talks = [Talk(small.branch(length)) for length in (15, 77, 127)]
    for _ in range(2):
        small.step(talks)
    talks.pop(1).session.close()
    talks.append(Talk(small.branch(250)))       # takes the page that is free
    for _ in range(4):
        small.step(talks)
    assert [talk.said for talk in talks] == [small.alone(length, n)[0] for length, n in ((15, 6), (127, 6), (250, 4))]


@pytest.mark.parametrize("how", [{"logit_bias": {CONFIG.vocab_size: 1.0}}, {"logit_bias": {-1: 1.0}},
                                 {"banned": frozenset({1 << 30})}])
def test_no_logit_outside_the_vocabulary_is_touched(how, small):
    talk = Talk(small.branch(7), Sampling(**how))
    with pytest.raises(ValueError, match="vocabulary has 128"):
        small.step([talk])


def test_a_mask_says_it_of_every_token(small):
    with pytest.raises(ValueError, match="one for each token"):
        small.step([Talk(small.branch(7), mask=np.ones(1, bool))])


def test_a_full_context_is_refused_before_anything_happens(small):
    talks = [Talk(small.branch(7)), Talk(small.open(context=8))]
    talks[1].session.branch(small.base(7), 7)
    for _ in range(2):
        small.step(talks)
    with pytest.raises(ValueError, match="8 \\+ 1 tokens, context is 8"):
        small.step(talks)
    assert [len(talk.session.tokens) for talk in talks] == [8, 8]
