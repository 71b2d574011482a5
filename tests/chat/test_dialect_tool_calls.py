"""Tool calls in the prompt: canonical spelling, exact replay, and the prefix that both keep."""
import pytest

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.dialects.deepseek_v4_templates import call_block
from ds4mlx.chat.dialects.prompt import Replay
from ds4mlx.chat.json_text import parse, spell
from ds4mlx.chat.messages import Conversation, Message, Reasoning, TextPart, Tool, ToolCall, ToolResult
from ds4mlx.text.segments import EOS, THINK_CLOSE, Control, Text, rendered_text

CLOSE = "</｜DSML｜parameter>"


def parameters(arguments):
    """The lines between the invoke tags."""
    block = rendered_text(call_block([ToolCall("c", "f", arguments)]))
    return block.split('invoke name="f">\n')[1].split("\n</｜DSML｜invoke>")[0]


def parameter(key, kind, value):
    return f'<｜DSML｜parameter name="{key}" string="{kind}">{value}{CLOSE}'


@pytest.mark.parametrize("json, spelled", [
    ('{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'), ("[1e3,1.50,-0,1E+2]", "[1e3, 1.50, -0, 1E+2]"),
    ("12345678901234567890", "12345678901234567890"), ("1" * 5000, "1" * 5000), ('"\\u4e2d\\/\\n"', '"中/\\n"'),
    ('{"b":{},"a":[],"c":null,"d":true}', '{"b": {}, "a": [], "c": null, "d": true}')])
def test_json_keeps_order_and_numbers_and_gets_the_models_spacing(json, spelled):
    assert spell(parse(json)) == spelled
    assert spell(parse(spelled)) == spelled


@pytest.mark.parametrize("arguments, lines", [
    ('{"k": "a\\nb <&> \\"q\\""}', parameter("k", "true", 'a\nb <&> "q"')),
    ('{"n":1e3}', parameter("n", "false", "1e3")),
    ('{"b": 1, "a": [1,"x"]}', parameter("b", "false", "1") + "\n" + parameter("a", "false", '[1, "x"]')),
    ("{}", ""), ("not json", parameter("arguments", "true", "not json")),
    ("[1,2]", parameter("arguments", "true", "[1,2]")),
    ('{"x": NaN}', parameter("arguments", "true", '{"x": NaN}')),
    ("[" * 9999, parameter("arguments", "true", "[" * 9999)),
    ('{"<a&\\"b>": ""}', parameter("&lt;a&amp;&quot;b&gt;", "true", ""))])
def test_arguments_are_spelled_canonically(arguments, lines):
    assert parameters(arguments) == lines


def test_a_closing_tag_inside_a_value_is_escaped():
    assert parameter("k", "true", "a&lt;/｜DSML｜parameter>b") == parameters(f'{{"k": "a{CLOSE}b"}}')
    assert parameter("k", "false", '["\\u003c/｜DSML｜parameter>"]') == parameters(f'{{"k": ["{CLOSE}"]}}')


def test_markers_of_the_block_are_control_tokens_and_nothing_else_is():
    segments = call_block([ToolCall("c", "f", f'{{"k": "{CLOSE}"}}')])
    assert sum(isinstance(segment, Control) for segment in segments) == 6
    assert all(segment.literal == "｜DSML｜" for segment in segments if isinstance(segment, Control))


TOOLS = (Tool("echo", {"name": "echo"}),)
QUESTION = Message("user", (TextPart("Q"),))
CALL = ToolCall("c1", "echo", '{"text": "hi", "n": 1}')
RESULT = Message("tool", (ToolResult("c1", "R"),))


def prompt(*messages, replay=None):
    return render(Conversation(messages, tools=TOOLS), effort_profile="0731", replay=replay)


@pytest.mark.parametrize("content", ["I look.", "", "See below:\n\n"])
def test_the_next_turn_begins_with_this_turn_and_its_answer(content, v4_tokenizer):
    answer = Message("assistant", (Reasoning("Hm."), TextPart(content), CALL))
    sampled = [Text("Hm."), Control(THINK_CLOSE), Text(content.rstrip()), *call_block([CALL]), Control(EOS)]
    before = [*prompt(QUESTION).segments, *sampled]
    after = v4_tokenizer.key_bytes(prompt(QUESTION, answer, RESULT).segments)
    assert after.startswith(v4_tokenizer.key_bytes(before))


@pytest.mark.parametrize("content, lead", [("Done.", ""), ("Done", "  \n"), ("Done", "\n"), ("", "")])
def test_an_exactly_replayed_block_keeps_the_sampled_ids(content, lead, v4_tokenizer):
    odd = [i for character in "tool_calls>" for i in v4_tokenizer.encode_literal(character)]
    ids = tuple([30, v4_tokenizer.control["｜DSML｜"], *odd])
    answer = Message("assistant", (Reasoning("Hm."), TextPart(content), CALL))
    replay = {1: Replay(lead, ids, v4_tokenizer.decode(ids))}
    sampled = v4_tokenizer.encode([*prompt(QUESTION).segments, Text("Hm."), Control(THINK_CLOSE), Text(content + lead)])
    after = v4_tokenizer.encode(prompt(QUESTION, answer, RESULT, replay=replay).segments)
    assert after[:len(sampled) + len(ids)] == [*sampled, *ids]
