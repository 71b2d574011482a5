"""Stop strings end an answer where its visible text says so."""
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4mlx.chat.events import TextDelta, gather
from ds4mlx.chat.stop_strings import StopStrings
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.text.segments import DSML, THINK_CLOSE, Control


def read(stop, *pieces, thinking=False, tools=None):
    stream = AnswerStream(thinking=thinking, tools=tools, stop=stop)
    events = []
    for piece in pieces:
        events += stream.push(piece.encode() if isinstance(piece, str) else piece)
    return gather(events + stream.finish("length")), stream


def test_the_match_and_what_follows_are_not_shown():
    answer, stream = read(["END"], "one E", "ND two")
    assert (answer.content, stream.finish_reason, stream.stop_string) == ("one ", "stop_string", "END")


def test_the_answer_is_done_with_the_token_that_completes_the_match():
    stream = AnswerStream(thinking=False, tools=None, stop=["\n\n"])
    assert stream.push(b"a\n") == [TextDelta("a")]
    assert stream.push(b"\nb") == [] and stream.done


def test_the_earliest_match_wins_and_of_those_the_longest():
    assert read(["b", "ab", "abc"], "x", "a", "b", "c")[1].stop_string == "abc"
    assert read(["bc", "abd"], "a", "b", "c")[1].stop_string == "bc"
    assert read(["b", "abcd"], "abcx")[1].stop_string == "b"


def test_a_match_that_waits_for_a_longer_one_stands_at_the_end():
    answer, stream = read(["ab", "abc"], "xab")
    assert (answer.content, stream.finish_reason, stream.stop_string) == ("x", "stop_string", "ab")


def test_reasoning_and_tool_calls_are_not_searched():
    answer, stream = read(["ls"], "ls", Control(THINK_CLOSE), "a\n<", Control(DSML), "tool_calls><", Control(DSML),
                          'invoke name="ls"></', Control(DSML), "invoke></", Control(DSML), "tool_calls>",
                          thinking=True, tools=["ls"])
    assert (answer.reasoning, answer.content, answer.calls) == ("ls", "a", (("ls", "{}"),))
    assert (stream.finish_reason, stream.stop_string) == ("tool_calls", None)


def test_white_space_dropped_before_a_block_does_not_stop():
    answer, stream = read(["\n\n", "a\n"], "a", "\n\n<", Control(DSML), "tool_calls>\n<", Control(DSML), "inv",
                          tools=["ls"])
    assert stream.stop_string is None
    assert answer.content == f"a\n\n<{DSML}tool_calls>\n<{DSML}inv"


def test_text_held_for_a_stop_string_comes_before_the_block():
    answer, _ = read(["a!"], "a", "<", Control(DSML), "tool_calls>", tools=["ls"])
    assert answer.content == f"a<{DSML}tool_calls>"


def test_empty_stop_strings_are_ignored():
    assert read(["", ""], "text")[0].content == "text"


def slow(strings, text):
    for at in range(len(text)):
        matches = [string for string in strings if text.startswith(string, at)]
        if matches:
            return text[:at], max(matches, key=len)
    return text, None


STRINGS = st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=300)
@given(STRINGS, st.lists(st.text("ab<", max_size=6), max_size=8))
def test_stop_strings_agree_with_a_search_of_the_whole_text(strings, pieces):
    stops = StopStrings(strings)
    shown = ""
    for count, piece in enumerate(pieces, 1):
        shown += stops.feed(piece)
        held = len("".join(pieces[:count])) - len(shown)
        assert stops.matched is not None or held < max(map(len, strings))
    assert (shown + (stops.flush() if stops.matched is None else ""), stops.matched) == slow(strings, "".join(pieces))
