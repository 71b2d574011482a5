"""Output that tries to hang the reader, to make it hold everything, or to exhaust the stack."""
import json
import sys

import pytest

from ds4mlx.chat.events import ToolArgsDelta, gather
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.text.segments import DSML, Control

OPEN_CALL = ["<", Control(DSML), "tool_calls><", Control(DSML), 'invoke name="run">']


def open_stream(*pieces, thinking=False):
    stream = AnswerStream(thinking=thinking, tools=["run"])
    return stream, [event for piece in pieces for event in push(stream, piece)]


def push(stream, piece):
    return stream.push(piece.encode() if isinstance(piece, str) else piece)


def calls_of(work) -> int:
    """How many functions `work` calls, in Python and below: a measure of time that no other process disturbs."""
    count = 0

    def count_call(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


REPEATED = {
    "a string": [*OPEN_CALL, "<", Control(DSML), 'parameter name="x" string="true">'],
    "a JSON value": [*OPEN_CALL, "<", Control(DSML), 'parameter name="x" string="false">'],
    "a value without kind": [*OPEN_CALL, "<", Control(DSML), 'parameter name="x">'],
    "a document": ['<tool_calls><invoke name="run"><parameter name="x">'],
    "text": [],
}


@pytest.mark.parametrize("unit", ["x", " ", "<", "&am", "</", '"\\', "[", "<tool_calls>", "<tool_calls><invoke name='"])
@pytest.mark.parametrize("head", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("thinking", [False, True])
def test_work_grows_no_faster_than_the_answer(head, unit, thinking):
    def work(length: int) -> int:
        stream, _ = open_stream(*head, thinking=thinking)
        raw = (unit * length).encode()[:length]
        return calls_of(lambda: [stream.push(bytes([byte])) for byte in raw] + stream.finish("stop"))
    assert work(2000) < 4.5 * work(500)


def test_a_long_push_takes_no_more_work_than_many_short_ones():
    body = "<tool_calls><invoke name='run'>" * 2000
    one = calls_of(lambda: open_stream(body))
    many = calls_of(lambda: open_stream(*[body[at:at + 8] for at in range(0, len(body), 8)]))
    assert one < many


def test_a_long_string_is_not_held():
    stream, _ = open_stream(*REPEATED["a string"])
    longest = len(f"</{DSML}parameter>")
    pushed = shown = 0
    for piece in ["some text ", "<", "</", "&amp", "\n", "中"] * 200:
        pushed += len(piece)
        shown += sum(len(event.fragment) for event in push(stream, piece) if isinstance(event, ToolArgsDelta))
        assert pushed - shown < longest + 4 * 200  # an entity in the text is four characters shorter when decoded


@pytest.mark.parametrize("attribute", ["x" * 100_000, "x" * 100_000 + '">', "&lt;" * 50_000, ">" * 100_000])
def test_a_giant_attribute_breaks_the_block_off(attribute):
    stream, _ = open_stream(*OPEN_CALL, "<", Control(DSML), 'parameter name="' + attribute)
    assert (stream.done, stream.finish_reason) == (True, "error")


def test_a_giant_attribute_in_a_document_is_text():
    text = '<tool_calls><invoke name="' + "x" * 100_000
    stream, events = open_stream(text)
    assert gather(events + stream.finish("stop")).content == text


def nested(depth: int) -> list[str | Control]:
    return [part for _ in range(depth) for part in ("<", Control(DSML), 'parameter name="x">')]


def test_parameters_nest_to_a_limit():
    stream, events = open_stream(*OPEN_CALL, *nested(64), "1", *["</", Control(DSML), "parameter>"] * 64,
                                 "</", Control(DSML), "invoke>")
    assert json.loads(gather(events).calls[0][1])["x"]["x"]["x"]
    assert not stream.done


def test_bottomless_parameters_break_the_block_off():
    stream, _ = open_stream(*OPEN_CALL, *nested(2000))
    assert stream.finish_reason == "error"


def test_calls_without_end_stay_cheap_to_follow():
    stream, _ = open_stream(*OPEN_CALL, "</", Control(DSML), "invoke>")
    events = [event for _ in range(2000)
              for piece in ("<", Control(DSML), 'invoke name="run"></', Control(DSML), "invoke>")
              for event in push(stream, piece)]
    assert len(events) == 4 * 2000  # start, two fragments, end
    assert not stream.done


def test_bytes_that_are_no_utf8_become_replacement_characters():
    stream, events = open_stream(*REPEATED["a string"], b"\xff\xc0", "a", b"\xe4\xb8", "</", Control(DSML),
                                 "parameter></", Control(DSML), "invoke>")
    assert json.loads(gather(events).calls[0][1]) == {"x": "\ufffd\ufffda\ufffd"}
