"""A session that begins where another one is shares its rows, and neither notices the other."""
import numpy as np
import pytest
from small_model import CONFIG
from state import whole
from talks import Talk, bench

from ds4mlx.engine.mlx_memory import page_bytes
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.models.deepseek_v4.pages import PAGE_TOKENS

LIMIT = 2e-5    # as for rows that decode together


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count).tolist()


@pytest.fixture
def own():
    """A model of its own, so that pages can be counted."""
    return bench()


def test_a_page_is_a_span():
    assert PAGE_TOKENS == SPAN_TOKENS


def test_a_second_session_over_a_20k_prompt_costs_its_own_rows_only(own):
    first, second = own.open(24576), own.open(24576)
    prompt, pages = tokens(20000), own.pools.pages
    for at in range(0, len(prompt), 2048):
        first.feed(prompt[at:at + 2048])
    held, held_bytes = pages.held, pages.nbytes
    assert held == 10 and second.branch(first, 20000) == 20000 and pages.held == held
    second.feed(tokens(400, seed=1))
    assert pages.held == held + 1       # the open page, with its 544 tokens of the prompt, and no other
    second.feed(tokens(1000, seed=2))
    assert pages.held == held + 2
    assert pages.nbytes - held_bytes <= pages.capacity // 3 * sum(page_bytes(CONFIG, packed=False))     # grown by half


def test_a_branch_and_its_origin_come_to_the_states_that_they_would_come_to_alone(small):
    prompt = tokens(2100)
    shared, apart = [small.prefilled(prompt), small.open()], [small.prefilled(prompt), small.prefilled(prompt)]
    shared[1].branch(shared[0], 2100)
    for i in range(3):      # by turns, so that each would write over the other
        for seed, session in enumerate([*shared, *apart]):
            session.feed(tokens(33, seed=10 * i + seed % 2))
    for ours, theirs in zip(map(whole, shared), map(whole, apart)):
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_a_branch_takes_the_largest_mark_and_makes_it_its_own(small):
    first, second = small.prefilled(tokens(40)), small.open()
    first.feed(tokens(20, seed=1))
    first.mark()
    first.feed(tokens(9, seed=2))
    reached = {length: second.branch(first, length) for length in (100, 69, 68, 60, 59, 40, 39)}
    assert reached == {100: 69, 69: 69, 68: 60, 60: 60, 59: 40, 40: 40, 39: 0}
    assert second.tokens == [] and second.marks == []
    assert second.branch(first, 60) == 60 and second.marks == [60] and second.rewind(59) == 0


def test_a_branch_forgets_what_was_there_and_its_snapshots(small):
    from ds4mlx.errors import CheckpointError
    first, second = small.prefilled(tokens(40)), small.prefilled(tokens(2050, seed=1))
    snapshot = second.snapshot()
    assert second.branch(first, 40) == 40 and second.marks == [40]
    with pytest.raises(CheckpointError):
        snapshot.head(0)


def test_a_branch_is_no_longer_than_its_context(small):
    first, second = small.prefilled(tokens(40)), small.open(context=50)
    first.feed(tokens(20, seed=1))
    assert second.branch(first, 100) == 40


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("length", [13, 127, 2043])
def test_a_session_that_decodes_can_be_branched_from(length, lookahead):
    small = bench(lookahead=lookahead)
    talk, other = Talk(small.branch(length)), Talk(small.branch(30))
    for _ in range(3):
        small.step([other, talk])
    later, earlier = Talk(small.open()), Talk(small.open())
    assert later.session.branch(talk.session, length + 2) == length + 2
    assert earlier.session.branch(talk.session, length + 1) == length
    later.said = list(talk.said)
    for _ in range(5):
        small.step([talk, later, other])
        small.step([earlier])
    expected, logits = small.alone(length, 8)
    assert talk.said == later.said == expected and earlier.said == expected[:5]
    for session in (talk.session, later.session):
        np.testing.assert_allclose(session.logits(), logits, atol=LIMIT)


def test_a_branch_outlives_the_session_it_came_from(small):
    talk, second = Talk(small.branch(250)), small.open()
    small.step([talk])
    second.branch(talk.session, 250)
    talk.session.close()
    small.branch(2043)      # takes pages that are free
    branched = Talk(second)
    for _ in range(8):
        small.step([branched])
    assert branched.said == small.alone(250, 8)[0]


def test_what_cannot_be_branched_from_is_refused_and_changes_nothing(small):
    session, closed = small.prefilled(tokens(40)), small.open()
    closed.close()
    for other, complaint in ((closed, "closed"), (bench().prefilled(tokens(9)), "another engine's")):
        with pytest.raises(ValueError, match=complaint):
            session.branch(other, 40)
    with pytest.raises(ValueError, match="closed"):
        closed.branch(session, 40)
    assert session.tokens == tokens(40) and session.marks == [40] and closed.table.entries == []


def test_a_session_branches_from_itself_by_going_back(small):
    session = small.prefilled(tokens(40))
    session.feed(tokens(20, seed=1))
    assert session.branch(session, 50) == 40 and session.tokens == tokens(40)


def test_a_closed_session_leaves_no_page_behind(own):
    talks = [Talk(own.prefilled(tokens(n))) for n in (30, 2049)]
    own.step(talks)
    own.step(talks)
    talks[1].session.rewind(0)
    assert own.pools.pages.held == 1
    for talk in talks:
        talk.session.close()
    assert own.pools.pages.held == 0


@pytest.mark.parametrize("same, shared", [(4080, 1), (2048, 1), (2047, 0), (0, 0)])
def test_a_restored_session_shares_the_spans_that_another_one_has(same, shared, own):
    state = whole(own.prefilled(tokens(4080)))     # of a session that is gone
    live, restored = own.prefilled(tokens(same) + tokens(4080 - same, seed=1)), own.open()
    restored.restore(state)
    assert sum(page in live.table.entries for page in restored.table.entries) == shared
    before = whole(live)
    restored.feed(tokens(9, seed=2))
    assert all(np.array_equal(before[name], array) for name, array in whole(live).items())
    restored.rewind(4080)
    assert all(np.array_equal(state[name], array) for name, array in whole(restored).items())


def test_rows_that_differ_are_not_shared_though_their_tokens_are_the_same(own):
    live, restored = own.prefilled(tokens(2100)), own.open()
    state = whole(live)
    state["L1.comp"] = state["L1.comp"] + np.float32(1)
    restored.restore(state)
    assert not {*restored.table.entries} & {*live.table.entries}
    assert np.array_equal(whole(restored)["L1.comp"], state["L1.comp"])
