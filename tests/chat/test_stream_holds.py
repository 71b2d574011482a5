"""What is held back while an answer is read, and that it comes out in the end."""
import pytest

from ds4mlx.chat.events import ReasoningDelta, TextDelta, ToolBlockStart, gather
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.text.segments import DSML, EOS, THINK_CLOSE, THINK_OPEN, Control


def stream(*, thinking=False, tools=("bash",), stop=()):
    return AnswerStream(thinking=thinking, tools=tools, stop=stop)


def push(answer, *pieces):
    """Events of tokens given as text or control tokens."""
    return [event for piece in pieces for event in answer.push(piece.encode() if isinstance(piece, str) else piece)]


def test_text_without_a_reason_to_hold_it_comes_at_once():
    answer = stream()
    assert push(answer, "Hello") == [TextDelta("Hello")]
    assert push(answer, " 1 < 2") == [TextDelta(" 1 < 2")]


@pytest.mark.parametrize("character", ["é", "中", "😀"])
def test_a_character_comes_whole_or_not_at_all(character):
    answer = stream(tools=None)
    *first, last = character.encode()
    assert [answer.push(bytes([byte])) for byte in first] == [[]] * len(first)
    assert answer.push(bytes([last])) == [TextDelta(character)]


def test_a_control_token_inside_a_character_ends_it():
    answer = stream(thinking=True)
    assert gather(push(answer, b"a\xf0\x9f", Control(THINK_CLOSE), b"\x98\x80")).reasoning == "a\ufffd"


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
@pytest.mark.parametrize("held", ["\n \t", " <", "\n\n<tool_call", "<｜DSM", "x" * 7])
def test_every_end_releases_what_is_held(held, reason):
    answer = stream(stop=["x" * 8])
    events = push(answer, "text", held)
    assert gather(events).content == "text"
    assert gather(events + answer.finish(reason)).content == "text" + held
    assert (answer.finish_reason, answer.done) == (reason, True)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_every_end_releases_held_reasoning(reason):
    answer = stream(thinking=True)
    events = push(answer, "so \n", "</thi", b"\xe4\xb8") + answer.finish(reason)
    assert gather(events).reasoning == "so \n</thi\ufffd"
    assert not answer.reasoning_closed


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
@pytest.mark.parametrize("thinking", [False, True])
def test_every_end_releases_a_block_that_might_have_been_one(thinking, reason):
    block = "\n<tool_calls>\n<invoke name=\"bash\">\n<parameter name=\"command\">ls <"
    answer = stream(thinking=thinking)
    events = push(answer, "Say", *block) + answer.finish(reason)
    whole = gather(events)
    assert whole.reasoning + whole.content == "Say" + block
    assert (whole.calls, answer.finish_reason) == ((), reason)


def test_the_separator_before_a_block_is_never_shown():
    answer = stream()
    events = push(answer, "Look", ".\n", " ", "\n<", Control(DSML), "tool_calls>")
    assert events == [TextDelta("Look"), TextDelta("."), ToolBlockStart()]


@pytest.mark.parametrize("space", ["\u3000", "\u00a0", "\u2028", "\x1c"])
def test_other_white_space_before_a_block_is_text(space):
    assert push(stream(), "a" + space + "\n<", Control(DSML), "tool_calls>")[0] == TextDelta("a" + space)


def test_white_space_is_shown_when_text_follows_it():
    answer = stream()
    assert push(answer, "a\n") == [TextDelta("a")]
    assert push(answer, "\n", " ", "b") == [TextDelta("\n\n b")]


def test_without_tools_nothing_but_characters_is_held():
    for tools in (None, ()):
        answer = stream(tools=tools)
        events = push(answer, "a\n\n<", Control(DSML), "tool_calls>\n")
        assert gather(events).content == f"a\n\n<{DSML}tool_calls>\n"


def test_a_marker_that_turns_out_different_is_released_with_the_byte_that_tells():
    answer = stream()
    assert push(answer, "<tool_calls") == []
    assert push(answer, "!") == [TextDelta("<tool_calls!")]


def test_only_the_first_think_token_of_open_reasoning_is_swallowed():
    assert push(stream(thinking=True), Control(THINK_OPEN), "r", Control(THINK_OPEN)) == [
        ReasoningDelta("r"), ReasoningDelta(THINK_OPEN)]
    assert push(stream(), Control(THINK_OPEN)) == [TextDelta(THINK_OPEN)]


def test_a_stray_control_token_is_text():
    assert gather(push(stream(), "a", Control(THINK_CLOSE), "b")).content == "a</think>b"


def test_nothing_comes_after_the_end():
    answer = stream()
    push(answer, "a", Control(EOS))
    assert answer.finish_reason == "stop"
    assert push(answer, "b", Control(EOS)) == answer.finish("length") == []
    assert answer.finish_reason == "stop"


def test_reasoning_is_told_from_text_before_each_token():
    answer = stream(thinking=True)
    inside = []
    for piece in ("r", Control(THINK_CLOSE), "t"):
        inside.append(answer.in_reasoning)
        push(answer, piece)
    assert inside == [True, True, False]
    assert answer.reasoning_closed
