"""When a tool block counts, and what becomes of one that does not."""
import re

import pytest

from ds4mlx.chat.events import (ReasoningDelta, ReasoningEnd, Recovered, TextDelta, ToolArgsDelta, ToolBlockEnd,
                                ToolBlockStart, ToolCallEnd, ToolCallStart, gather)
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.chat.syntax.base import Region
from ds4mlx.text.segments import DSML, EOS, THINK_CLOSE, Control

START = "\n\n<D|tool_calls>\n"
CALL = '<D|invoke name="bash">\n<D|parameter name="command" string="true">ls</D|parameter>\n</D|invoke>\n'
HALF_CALL = '<D|invoke name="bash">\n<D|parameter name="command" string="true">l'
END = "</D|tool_calls>"
BASH = (("bash", '{"command":"ls"}'),)


def push(stream, text, mark=Control(DSML)):
    """Events of a text in which D| stands for the mark; it is read until the stream is done."""
    events = []
    for piece in re.split(r"(D\|)", text):
        for token in [mark] if piece == "D|" else [bytes([byte]) for byte in piece.encode()]:
            events += [] if stream.done else stream.push(token)
    return events


def answer(text, reason="stop", *, thinking=False, mark=Control(DSML)):
    stream = AnswerStream(thinking=thinking, tools=["bash"])
    events = push(stream, text, mark)
    return gather(events + stream.finish(reason)), stream


def quoted(text):
    return text.replace("D|", DSML)


def test_a_canonical_block_is_streamed_as_it_comes():
    stream = AnswerStream(thinking=False, tools=["bash"])
    assert push(stream, START) == [ToolBlockStart()]
    assert push(stream, '<D|invoke name="bash">') == [ToolCallStart(0, "bash"), ToolArgsDelta(0, "{")]
    assert push(stream, '<D|parameter name="command" string="true">') == [ToolArgsDelta(0, '"command":')]
    assert push(stream, "ls") == [ToolArgsDelta(0, '"l'), ToolArgsDelta(0, "s")]
    assert push(stream, "</D|parameter></D|invoke>") == [
        ToolArgsDelta(0, '"'), ToolArgsDelta(0, "}"), ToolCallEnd(0)]
    assert push(stream, END) == [ToolBlockEnd()]
    assert (stream.finish_reason, stream.exact_block) == ("tool_calls", True)


def test_nothing_after_the_block_is_read():
    whole, stream = answer("Text" + START + CALL + END + "\nmore")
    assert (whole.content, whole.calls, stream.finish_reason) == ("Text", BASH, "tool_calls")


def test_an_undeclared_tool_in_a_canonical_block_is_reported():
    whole, _ = answer(START + CALL.replace("bash", "rm") + END)
    assert whole.calls == (("rm", '{"command":"ls"}'),)


@pytest.mark.parametrize("mark", [b"", DSML.encode(), "DSML｜".encode(), f"｜{DSML}｜".encode()])
def test_other_spellings_count_once_complete_and_declared(mark):
    stream = AnswerStream(thinking=False, tools=["bash"])
    assert push(stream, START + CALL, mark) == []
    assert [type(event) for event in push(stream, END, mark)] == [
        ToolBlockStart, ToolCallStart, ToolArgsDelta, ToolCallEnd, ToolBlockEnd]
    assert not stream.exact_block


def test_the_mark_with_doubled_bars_around_the_token_counts():
    whole, _ = answer("".join([START, CALL, END]).replace("D|", "｜D|｜"))
    assert whole.calls == BASH


@pytest.mark.parametrize("text", [
    "<tool_calls> is a tag", "<tool_calls></tool_calls>", "<tool_calls><invoke name='rm'></invoke></tool_calls>",
    "<tool_calls>\n<tool_calls>\n<div>", '<tool_calls><invoke name="bash"><parameter name="a">x</invoke>',
])
def test_what_only_looks_like_a_block_is_text(text):
    whole, stream = answer("See " + text + " there")
    assert (whole.content, whole.calls, stream.finish_reason) == ("See " + text + " there", (), "stop")


def fitting(command):
    """A stream of a strict tool that takes one command only."""
    return AnswerStream(thinking=False, tools=["bash"], fits=lambda name, arguments: command in arguments)


@pytest.mark.parametrize("mark", [b"", DSML.encode(), "DSML｜".encode(), f"｜{DSML}｜".encode()])
def test_other_spellings_count_if_they_keep_to_the_schema_of_a_strict_tool(mark):
    stream = fitting("ls")
    assert gather(push(stream, START + CALL + END, mark) + stream.finish("stop")).calls == BASH
    stream, text = fitting("pwd"), START + CALL + END + " and more"
    told = gather(push(stream, text, mark) + stream.finish("stop"))
    assert told.calls == () and told.content == text.replace("D|", mark.decode()) and stream.finish_reason == "stop"


@pytest.mark.parametrize("command, calls, reasoning", [
    ("ls", BASH, "Hm."), ("pwd", (), quoted("Hm." + START + CALL + END))])
def test_a_block_in_forgotten_reasoning_counts_if_it_keeps_to_a_strict_schema(command, calls, reasoning):
    stream = AnswerStream(thinking=True, tools=["bash"], fits=lambda name, arguments: command in arguments)
    told = gather(push(stream, "Hm." + START + CALL + END) + stream.finish("stop"))
    assert (told.calls, told.reasoning) == (calls, reasoning)


def test_a_canonical_block_is_never_asked_whether_it_fits():
    assert gather(push(fitting("pwd"), START + CALL + END)).calls == BASH


@pytest.mark.parametrize("text", ["<tool_calls>", '<tool_calls>\n<invoke name="bash">\n<parameter name="x">text'])
def test_a_canonical_block_counts_after_quoted_markup(text):
    whole, _ = answer(text + START + CALL + END)
    assert (whole.content, whole.calls) == (text, BASH)


def test_a_quoted_mark_inside_a_canonical_value_is_text():
    tag = quoted("</D|parameter>")
    whole, _ = answer(START + CALL.replace("ls", tag) + END)
    assert whole.calls == (("bash", f'{{"command":"{tag}"}}'),)


def test_control_tokens_inside_a_value_are_text():
    stream = AnswerStream(thinking=False, tools=["bash"])
    events = push(stream, START + HALF_CALL) + stream.push(Control(THINK_CLOSE)) + stream.push(Control(DSML))
    events += push(stream, "</D|parameter></D|invoke>" + END)
    assert gather(events).calls == (("bash", f'{{"command":"l</think>{DSML}"}}'),)


# A block inside open reasoning

def test_a_block_that_ends_the_answer_closes_forgotten_reasoning():
    stream = AnswerStream(thinking=True, tools=["bash"])
    assert push(stream, "x" + START + CALL + END) == [ReasoningDelta("x")]
    events = stream.push(Control(EOS))
    assert (events[0], gather(events).calls) == (ReasoningEnd(natural=True), BASH)
    assert (stream.finish_reason, stream.implicit_close, stream.exact_block) == ("tool_calls", True, True)


def test_a_block_at_the_limit_closes_forgotten_reasoning_and_a_cancelled_one_does_not():
    assert answer("x" + START + CALL + END, "length", thinking=True)[0].calls == BASH
    whole, stream = answer("x" + START + CALL + END, "cancelled", thinking=True)
    assert (whole.calls, whole.reasoning) == ((), quoted("x" + START + CALL + END))
    assert stream.finish_reason == "cancelled"


@pytest.mark.parametrize("text", [START + CALL + END + " so", START + CALL + "oops", START + HALF_CALL, START + END])
def test_any_other_block_in_reasoning_is_reasoning(text):
    whole, stream = answer("x" + text, thinking=True)
    assert (whole.reasoning, whole.content, whole.calls) == (quoted("x" + text), "", ())
    assert not stream.reasoning_closed


@pytest.mark.parametrize("quote", [START, START + HALF_CALL, START + HALF_CALL + "<", START + CALL + END + "\n"])
def test_the_end_of_thinking_ends_a_quoted_block(quote):
    stream = AnswerStream(thinking=True, tools=["bash"])
    events = push(stream, "x" + quote) + stream.push(Control(THINK_CLOSE)) + push(stream, "y" + START + CALL + END)
    whole = gather(events)
    assert (whole.reasoning, whole.content, whole.calls) == (quoted("x" + quote), "y", BASH)


# A canonical block that breaks off

@pytest.mark.parametrize(("reason", "finish"), [
    ("stop", "tool_calls"), ("length", "length"), ("cancelled", "cancelled")])
@pytest.mark.parametrize("rest", ["", "<D|inv", HALF_CALL])
def test_complete_calls_of_an_unterminated_block_stand(rest, reason, finish):
    whole, stream = answer(START + CALL + rest, reason)
    assert (whole.calls, whole.content, stream.finish_reason) == (BASH, "", finish)
    assert (stream.exact_block, stream.open_call) == (False, 1 if rest == HALF_CALL else None)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_a_block_without_a_call_comes_back_as_text(reason):
    stream = AnswerStream(thinking=False, tools=["bash"])
    events = push(stream, "a" + START + "<D|invoke na") + stream.finish(reason)
    assert events == [TextDelta("a"), ToolBlockStart(), Recovered(quoted(START + "<D|invoke na"))]
    assert stream.finish_reason == reason


@pytest.mark.parametrize(("reason", "finish"), [("stop", "error"), ("length", "length"), ("cancelled", "cancelled")])
def test_half_a_call_alone_is_an_error_unless_it_was_cut(reason, finish):
    whole, stream = answer(START + HALF_CALL, reason)
    assert (whole.calls, whole.content, stream.finish_reason, stream.open_call) == ((), "", finish, 0)
    assert stream.error_code == ("incomplete_tool_call" if finish == "error" else None)
    assert bool(stream.error) == (finish == "error")


@pytest.mark.parametrize("junk", ["x", "<D|x", "<D|invoke>", '<D|invoke name="">', "</D|i", "<D|invoke name=bash>",
                                  '<D|invoke name="a" "b">', '<D|invoke name="<', "</D|tool_calls>"])
def test_bad_structure_ends_the_block_at_once(junk):
    whole, stream = answer(START + junk + "?")
    assert (stream.finish_reason, whole.calls, whole.content) == ("stop", (), quoted(START + junk))


def test_bad_structure_inside_a_call_is_an_error():
    assert answer(START + '<D|invoke name="bash">x')[1].finish_reason == "error"
    assert answer(START + CALL + '<D|invoke name="bash">x')[0].calls == BASH


# What the sampler asks

def test_eos_is_masked_only_while_a_streamed_block_is_open():
    for text, masked in [("a", False), (START, True), (START + HALF_CALL, True), (START + CALL + END, False)]:
        stream = AnswerStream(thinking=False, tools=["bash"])
        push(stream, text)
        assert stream.masks_eos == masked


def test_eos_is_not_masked_in_a_block_that_may_be_a_document():
    for thinking, mark in [(True, Control(DSML)), (False, b"")]:
        stream = AnswerStream(thinking=thinking, tools=["bash"])
        push(stream, START + HALF_CALL, mark)
        assert (stream.masks_eos, stream.region) == (False, Region.STRING_BODY)


def test_structure_without_end_breaks_the_block_off():
    stream = AnswerStream(thinking=False, tools=["bash"])
    push(stream, START)
    pushed = 0
    while not stream.done:
        stream.push(b" ")
        pushed += 1
    assert pushed == 512  # one more than may follow each other: the line end behind the start tag is one
    assert stream.finish_reason == "stop"


def test_values_without_end_do_not_break_the_block_off():
    stream = AnswerStream(thinking=False, tools=["bash"])
    push(stream, START + HALF_CALL + "</ " * 2000)
    assert not stream.done


@pytest.mark.parametrize(("head", "region"), [
    (' string="true">', "B"), (">", "B"), (">\n ", "B"), (">\n</", "S"), (' string="false">', "J"),
    (' string="false">"\\', "Q"), (' string="false">"\\"', "Q"), (' string="false">"\\\\"', "J"),
    (' string="false">"</', "S"), (' string="true">a<', "B"), (' string="true">a</D|', "S"),
    (' string="true">a</D|x', "B"), ('><D|parameter name="y"', "S"), ('><D|parameter name="y">', "B"),
])
def test_the_region_within_a_parameter(head, region):
    stream = AnswerStream(thinking=False, tools=["bash"])
    push(stream, START + '<D|invoke name="bash"><D|parameter name="x"' + head)
    assert stream.region is Region(region)
