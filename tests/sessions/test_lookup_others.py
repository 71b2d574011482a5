"""Going on from what another slot holds: when, how far, and in what words it is told. One character is one token."""
import pytest

from ds4mlx.sessions.explain import explain
from ds4mlx.sessions.lookup import (
    DISK_GAIN, Live, Other, RewindPoint, Stored, TrailingResults, VisibleKey, Wanted, branch, decide)

SYSTEM = "You are an agent. " * 40      # 720 tokens
MAIN, SIDE = SYSTEM + "The main task.", SYSTEM + "A subtask."


def ids(text):
    return [ord(character) for character in text]


def wanted(text=SIDE, **more):
    return Wanted(ids(text), text.encode(), **more)


def live(text, *points, shown=()):
    return Live(ids(text), text.encode(), tuple(VisibleKey(key.encode(), "thinking-visible", at) for at, key in shown),
                tuple(RewindPoint(n, n) for n in points))


def took(decision):
    return decision.best.source, decision.best.tokens, decision.best.donor


def test_a_beginning_that_another_slot_holds_is_shared():
    assert took(decide(wanted(), Live(), (), [Other(3, live(MAIN, 500, 720))])) == ("memory-rewind", 720, 3)


def test_of_several_slots_the_one_that_goes_furthest_shares():
    others = [Other(1, live(MAIN, 500)), Other(2, live(MAIN, 700)), Other(3, live(MAIN, 600))]
    assert took(decide(wanted(), Live(), (), others)) == ("memory-rewind", 700, 2)


@pytest.mark.parametrize("own, donor", [(699, 2), (700, None), (720, None)])
def test_the_slots_own_state_serves_unless_another_goes_further(own, donor):
    decision = decide(wanted(), live(MAIN, own), (), [Other(2, live(MAIN, 700))])
    assert took(decision) == ("memory-rewind", max(own, 700), donor)


def test_a_state_that_goes_on_whole_asks_for_no_other():
    decision = decide(wanted(), live(SYSTEM[:100]), (), [Other(2, live(MAIN, 700))])
    assert took(decision) == ("memory-token", 100, None)


@pytest.mark.parametrize("gain, source", [(DISK_GAIN - 1, "memory-rewind"), (DISK_GAIN, "disk-text")])
def test_a_saved_state_has_to_go_much_further(gain, source):
    saved = Stored("a file", 400 + gain, 400 + gain)
    decision = decide(wanted(), Live(), [saved], [Other(2, live(MAIN, 400))])
    assert decision.best.source == source and decision.plans[-2].donor == 2     # if the file cannot be read


@pytest.mark.parametrize("point", [1, 63, 721])
def test_what_is_worth_nothing_or_lies_behind_the_difference_is_not_shared(point):
    assert took(decide(wanted(), Live(), (), [Other(2, live(MAIN, point))])) == ("none", 0, None)


def test_what_a_client_shows_of_another_slots_state_serves_as_well():
    state, shown = SYSTEM + "Q hidden A", SYSTEM + "Q A"
    plan = branch(wanted(shown + " more"), Other(2, live(state, len(state), shown=[(len(state), shown)])))
    assert (plan.source, plan.tokens, plan.then, plan.key_bytes) == ("memory-rewind", len(state), "rest", len(shown))


def test_results_without_their_calls_go_on_from_no_other_slot():
    request = wanted(results=TrailingResults(frozenset({"call"}), alone=True), api="responses")
    assert decide(request, Live(), (), [Other(2, live(SIDE, len(SIDE)))]).plans == ()


# ---- in words

def told(text, own, *others):
    request = wanted(text)
    return explain(decide(request, own, (), others), request, own)


def test_what_is_shared_is_told_with_the_slot():
    said = told(SIDE, live("Another. " * 20), Other(3, live(MAIN, 720)))
    assert (said.beside, said.branched, said.common, said.live, said.reused) == (3, True, 720, len(MAIN), 720)
    assert "from-slot=3" in said.header() and said.because == (
        "the prompt parts from the state of slot 3 at token 720 of 734, its text in answer at byte 720; "
        "its first 720 tokens are shared with that slot")


def test_all_of_a_state_that_is_shared_is_told_so():
    said = told(MAIN + " More.", Live(), Other(1, live(MAIN, len(MAIN))))
    assert said.because == (f"the prompt begins with the state of slot 1, {len(MAIN)} tokens; "
                            f"its first {len(MAIN)} tokens are shared with that slot")


def test_a_miss_is_told_by_the_state_that_has_most_in_common():
    said = told(SIDE, live("You are nobody."), Other(1, live(MAIN)), Other(2, live(SYSTEM[:300] + "!")))
    assert (said.source, said.beside, said.branched, said.common) == ("none", 1, False, 720)
    assert "beside-slot=1" in said.header() and "the state of slot 1 at token 720" in said.because


def test_the_slots_own_state_is_told_of_where_others_have_no_more_in_common():
    said = told(SIDE, live(MAIN), Other(1, live(MAIN)))
    assert said.beside is None and "slot" not in said.header()
