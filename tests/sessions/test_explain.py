"""Every miss is told in numbers, with the client's block where the texts part, and never with the text."""
import pytest

from ds4mlx.sessions.explain import Explanation, Origin, Place, Row, explain, first_mismatch
from ds4mlx.sessions.lookup import Live, RewindPoint, Stored, TrailingResults, VisibleKey, Wanted, decide

BLOCKS = [("system", "s" * 100), ("tools", "t" * 50), ("messages[0]", "u" * 30), ("messages[1]", "a" * 40)]
TEXT = "".join(text for _, text in BLOCKS)
ORIGINS = [Origin(label, sum(len(text) for _, text in BLOCKS[:i + 1])) for i, (label, _) in enumerate(BLOCKS)]


def ids(text):
    return [ord(character) for character in text]


def live(text=TEXT, *points, shown=None):
    visible = (VisibleKey(shown.encode(), "thinking-visible", len(text)),) if shown else ()
    return Live(ids(text), text.encode(), visible, tuple(RewindPoint(n, n) for n in points))


def told(text, state, stored=(), saved_keys=None, **more) -> Explanation:
    wanted = Wanted(ids(text), text.encode(), **more)
    return explain(decide(wanted, state, stored), wanted, state, ORIGINS, saved_keys)


def changed(at):
    return TEXT[:at] + "!" + TEXT[at + 1:]


@pytest.mark.parametrize("at, block, byte", [(0, "system", 0), (99, "system", 99), (100, "tools", 0),
                                             (160, "messages[0]", 10), (219, "messages[1]", 39)])
def test_the_first_difference_is_placed_in_the_clients_block(at, block, byte):
    assert told(changed(at), live()).place == Place(block, byte, "live")


def test_a_difference_after_all_blocks_is_in_the_answer():
    assert told(TEXT + "<think>", live(TEXT + "</think>")).place == Place("answer", 1, "live")


def test_the_text_that_goes_along_furthest_is_compared():
    shown = TEXT.replace("u", "U")
    assert told(shown[:-1] + "!" + "more", live(shown=shown)).place == Place("messages[1]", 39, "thinking-visible")
    saved = {"file.kvm": (TEXT[:120] + "other").encode()}
    assert told(TEXT, Live(), saved_keys=saved).place == Place("tools", 20, "file.kvm")


def test_how_much_is_alike_is_told_in_bytes_and_nothing_where_no_text_is_left():
    assert told(changed(150), live()).alike == 150 and told(TEXT + "more", live()).alike == 0
    saved = {"a.kvm": TEXT[:120].encode() + b"other", "b.kvm": b"other"}
    assert told(changed(150), Live(), saved_keys=saved).alike == 120


def test_after_a_restart_the_difference_to_a_saved_state_is_put_in_words():
    told_of = told(TEXT, Live(), saved_keys={"a.kvm": TEXT[:120].encode() + b"other"})
    assert told_of.because == ("no state is live, the prompt parts from the text of a.kvm in tools at byte 20; "
                               "no saved state begins this prompt")


REASONS = [(TEXT + "more", live(), "live-prefix-match"), (changed(150), live(), "token-mismatch"), (TEXT, Live(),
           "no-live-checkpoint"), (TEXT[:150], live(), "incoming-prompt-shorter-than-live-checkpoint")]


@pytest.mark.parametrize("text, state, reason", REASONS)
def test_the_memory_miss_has_its_name(text, state, reason):
    assert told(text, state).reason == reason


WORDS = {
    "nothing to say": (TEXT + "more", live(), "", ()),
    "a rewind": (changed(150), live(TEXT, 70, 128), "the prompt parts from the live state at token 150 of 220, its "
                 "text in messages[0] at byte 0; 128 is the longest length to go back to", ()),
    "a rewind to just there": (changed(150), live(TEXT, 150), "the prompt parts from the live state at token 150 of "
                               "220, its text in messages[0] at byte 0", ()),
    "no place to go back to": (changed(150), live(), "the prompt parts from the live state at token 150 of 220, its "
                               "text in messages[0] at byte 0; there is no length of 64 to 150 tokens to go back to; "
                               "no saved state begins this prompt", ()),
    "too little in common": (changed(3), live(), "the prompt parts from the live state at token 3 of 220, its text in "
                             "system at byte 3; fewer than 64 tokens are worth nothing; no saved state begins this "
                             "prompt", ()),
    "a restart": (TEXT, Live(), "no state is live; no saved state begins this prompt", ()),
    "a restart with a cache": (TEXT, Live(), "no state is live; a saved state of 512 tokens goes further than what is "
                               "live", [Stored("f", 512, 100)]),
}


@pytest.mark.parametrize("text, state, because, stored", WORDS.values(), ids=WORDS)
def test_a_miss_is_put_in_words(text, state, because, stored):
    assert told(text, state, stored).because == because


def test_tokens_that_are_computed_again_are_counted():
    explanation = told(changed(150), live(TEXT, 128))
    assert (explanation.reused, explanation.common, explanation.lost) == (128, 150, 22)
    assert told(TEXT + "more", live()).lost == 0


def test_a_lost_tool_state_is_told():
    explanation = told("results", live(), api="responses", results=TrailingResults(frozenset("c"), alone=True))
    assert explanation.source == "none" and "the state they belong to is gone" in explanation.because


def test_the_header_is_one_line_of_numbers():
    assert told(changed(150), live(TEXT, 128)).header() == (
        "memory-rewind; reused=128; prompt=220; common=150; live=220; reason=token-mismatch; differs=messages[0]+0")


@pytest.mark.parametrize("text", [changed(150), TEXT + "SECRET", "SECRET", "SECRET" + TEXT])
def test_no_text_of_a_client_is_told(text):
    explanation = told(text, live(TEXT + "SECRET too", 70, shown=TEXT + "SECRET three"), saved_keys={"f": b"SECRET"})
    assert "SECRET" not in repr(explanation) + explanation.header()


def test_the_tokens_around_the_first_difference():
    rows = first_mismatch([*range(30)], [*range(20), 99], 20, around=2)
    assert rows == (Row(18, 18, 18), Row(19, 19, 19), Row(20, 20, 99), Row(21, 21, None), Row(22, 22, None))
    assert [row.same for row in rows] == [True, True, False, False, False]
    assert first_mismatch([], [], 0) == ()
