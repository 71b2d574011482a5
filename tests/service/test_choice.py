"""Which idle slot a request takes."""
import pytest

from ds4mlx.service.choice import SHELTERED_S, Seat, choose

NOW = 10_000.0


def chosen(*seats, prompt=30_000, on_disk=()):
    return choose(seats, prompt, NOW, lambda slot: dict(on_disk).get(slot, 0))


def main(slot=0, **facts):
    """A long conversation, in use just now."""
    return Seat(**{"slot": slot, "live": 90_000, "used_at": NOW - 60, **facts})


def test_a_conversation_goes_on_in_its_slot():
    assert chosen(Seat(0), main(1, reuse=90_000, continues=True), Seat(2)) == 1


def test_of_two_states_that_a_prompt_continues_the_longer_one_serves():
    assert chosen(Seat(0, 300, 300, True), Seat(1, 500, 500, True)) == 1


def test_an_edited_conversation_stays_in_its_slot():
    assert chosen(Seat(0), Seat(1, 2000, 1800, hinted=True)) == 1


@pytest.mark.parametrize("facts", [{"reuse": 511, "live": 600}, {"reuse": 25_000}, {"reuse": 80_000, "hinted": False}])
def test_without_a_hint_or_with_little_to_keep_an_empty_slot_serves(facts):
    assert chosen(main(0, **{"hinted": True, **facts}), Seat(1)) == 1


def test_an_empty_slot_serves_before_any_that_loses_something():
    assert chosen(main(0, reuse=25_000), Seat(1)) == 1


def test_a_slot_that_loses_next_to_nothing_serves_before_an_empty_one():
    assert chosen(Seat(0), Seat(1, 9000, 8600)) == 1
    assert chosen(Seat(0), Seat(1, 9000, 8400)) == 0


def test_what_is_on_disk_is_not_lost():
    assert chosen(Seat(0, 30_000), Seat(1, 50_000), on_disk={1: 49_000}) == 1


def test_what_the_request_shares_is_not_lost():
    assert chosen(Seat(0, 30_000), Seat(1, 50_000, 25_000)) == 1


def test_the_slot_used_longest_ago_gives_way_among_equals():
    assert chosen(Seat(0, 9000, used_at=3.0), Seat(1, 9000, used_at=1.0), Seat(2, 9000, used_at=2.0)) == 1


def test_a_side_call_spares_the_main_thread_while_another_slot_is_idle():
    saved = {0: 90_000}     # losing it costs a read only
    assert chosen(main(0), Seat(1, 4000, used_at=NOW), prompt=4000, on_disk=saved) == 1
    assert chosen(main(0), prompt=4000, on_disk=saved) == 0


def test_a_conversation_that_is_longer_than_all_others_is_spared_as_well():
    seats = Seat(0, 9000, used_at=NOW - 60), Seat(1, 8000, used_at=NOW)
    assert chosen(*seats, prompt=8500, on_disk={0: 9000, 1: 8000}) == 1
    assert chosen(*seats, prompt=9500, on_disk={0: 9000, 1: 8000}) == 0


def test_no_conversation_is_spared_its_own_edits():
    assert chosen(main(0, reuse=89_800), Seat(1, 80_000, 80, used_at=NOW - 100), prompt=89_900) == 0


def test_a_long_conversation_that_nobody_went_on_with_is_spared_no_more():
    stale = main(0, used_at=NOW - SHELTERED_S)
    assert chosen(stale, Seat(1, 4000, used_at=NOW), prompt=4000, on_disk={0: 90_000}) == 0
