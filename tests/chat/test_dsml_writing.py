"""How tool calls are written into a prompt."""
import pytest

from ds4mlx.chat.messages import ToolCall
from ds4mlx.chat.syntax.dsml import render_calls
from ds4mlx.text.segments import DSML, Control, Text, rendered_text


def written(*arguments: str) -> str:
    return rendered_text(render_calls([ToolCall("id", "run", text) for text in arguments]))


def parameters(arguments: str) -> str:
    """What stands between the invoke tags of one call."""
    head, tail = f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="run">\n', f"\n</{DSML}invoke>\n</{DSML}tool_calls>"
    text = written(arguments)
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head):-len(tail)]


def parameter(name: str, string: bool, value: str) -> str:
    return f'<{DSML}parameter name="{name}" string="{str(string).lower()}">{value}</{DSML}parameter>'


def test_no_calls_write_nothing():
    assert render_calls([]) == []


def test_the_mark_is_a_control_token_in_every_tag_and_text_lies_between():
    segments = render_calls([ToolCall("id", "run", '{"a": "1"}')])
    assert segments[::2] == [Text("\n\n<"), Text("tool_calls>\n<"), Text('invoke name="run">\n<'),
                             Text('parameter name="a" string="true">1</'), Text("parameter>\n</"),
                             Text("invoke>\n</"), Text("tool_calls>")]
    assert segments[1::2] == [Control(DSML)] * 6


def test_two_calls_stand_on_lines_of_one_block():
    assert written("{}", "{}") == (
        f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="run">\n\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="run">\n\n</{DSML}invoke>\n</{DSML}tool_calls>')


def test_keys_keep_their_order_and_only_strings_are_raw():
    assert parameters('{"b":"x\\n\\"y","a":[1,"\\u00e9",{"k":null}]}') == "\n".join([
        parameter("b", True, 'x\n"y'), parameter("a", False, '[1, "é", {"k": null}]')])


@pytest.mark.parametrize("number", ["1e3", "5000.0", "-0", "12345678901234567890", "1.10", "1E+400", "0.1e-7"])
def test_a_number_keeps_its_spelling(number):
    assert parameters(f'{{"n": {number}, "l": [{number}]}}') == "\n".join([
        parameter("n", False, number), parameter("l", False, f"[{number}]")])


@pytest.mark.parametrize(("arguments", "string", "value"), [
    ("not json", True, "not json"), ("", True, ""), ("[1,2]", False, "[1, 2]"), ("null", False, "null"),
    ('{"a": NaN}', True, '{"a": NaN}'),
])
def test_arguments_that_are_no_object_become_one_parameter(arguments, string, value):
    assert parameters(arguments) == parameter("arguments", string, value)


def test_a_closing_tag_in_a_value_is_escaped_and_other_markup_is_not():
    tag = f"</{DSML}parameter>"
    assert parameters(f'{{"s": "<b>&amp;{tag}"}}') == parameter("s", True, f"<b>&amp;&lt;{tag[1:]}")
    assert parameters(f'{{"l": ["<b>{tag}"]}}') == parameter("l", False, f'["<b>\\u003c{tag[1:]}"]')


def test_attributes_are_escaped():
    assert parameters('{"a<\\"&>": 1}') == parameter("a&lt;&quot;&amp;&gt;", False, "1")


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    assert parameters('{"s": "\\ud83d!", "\\udc00": ["\\udc00"]}') == "\n".join([
        parameter("s", True, "\ufffd!"), parameter("\ufffd", False, '["\ufffd"]')])


@pytest.mark.parametrize("depth", [200, 100_000])
def test_bottomless_arguments_are_written_as_they_are(depth):
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    assert parameters(arguments) == parameter("arguments", True, arguments)
