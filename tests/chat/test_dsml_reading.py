"""Tool blocks as models write them -> the arguments of the calls."""
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4mlx.chat.events import gather
from ds4mlx.chat.messages import ToolCall
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.chat.syntax.dsml import render_calls
from ds4mlx.text.segments import DSML, Control, Text


def read(segments):
    """(name, JSON text of the arguments) of each call in sampled segments."""
    stream = AnswerStream(thinking=False, tools=["run"])
    return gather([event for segment in segments for event in stream.push(
        segment.text.encode() if isinstance(segment, Text) else segment)]).calls


def sampled(text):
    """Text in which D| stands for the control token."""
    return [Control(DSML) if part == "D|" else Text(part) for part in re.split(r"(D\|)", text)]


def call(body):
    """The arguments of one call."""
    (_, arguments), = read(sampled(f'<D|tool_calls><D|invoke name="run">{body}</D|invoke></D|tool_calls>'))
    return arguments


def parameter(body, attributes='name="x" string="true"'):
    return f"<D|parameter {attributes}>{body}</D|parameter>"


def round_trip(arguments: str) -> str:
    (name, read_back), = read(render_calls([ToolCall("id", "run", arguments)]))
    assert name == "run"
    return read_back


VALUES = ["<b>", 'say "hi"', "\\n \\", "line\n\n", "\r\n", "\t", "中文字", "😀\u200d", f"</{DSML}parameter>", "</think>",
          f"<{DSML}tool_calls>", "", " ", "'", "\u2028", "\x00\x7f", "a</", "&", "&nbsp;", "& lt;"]


@pytest.mark.parametrize("value", VALUES)
def test_a_written_string_is_read_back(value):
    arguments = {"s": value, "l": [value, {value: value}], value or "k": 1}
    assert json.loads(round_trip(json.dumps(arguments))) == arguments


@pytest.mark.parametrize("number", ["1e3", "5000.0", "-0", "-0.0", "12345678901234567890", "1.10", "1E+400"])
def test_a_written_number_is_read_back_in_its_spelling(number):
    assert round_trip(f'{{"n": {number}, "l": [{number}]}}') == f'{{"n":{number},"l":[{number}]}}'


CLEAN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="&"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | CLEAN
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CLEAN, inner, max_size=3),
                    max_leaves=6)


@settings(max_examples=200)
@given(st.dictionaries(CLEAN.filter(bool), JSON, max_size=4))
def test_any_arguments_without_entities_are_read_back(arguments):
    assert json.loads(round_trip(json.dumps(arguments))) == arguments


def test_what_was_read_is_written_and_read_the_same():
    arguments = round_trip('{"a":"x\\ny","n":1e3,"o":{"k":[1,2.50]},"e":"\\u00e9"}')
    assert round_trip(arguments) == arguments


@pytest.mark.parametrize("attributes", [
    'string="true" name="x"', "name='x' string='true'", "name=“x” string=“true”", "name=”x” string=‘true’",
    '\n name = "x"\tstring="TRUE" ', 'name="x" string="true" lang="en" name="y"', 'name="x" string="yes"',
])
def test_attributes_come_in_any_order_and_quotes(attributes):
    assert call(parameter("1", attributes)) == '{"x":"1"}'


def test_attribute_entities_are_decoded():
    assert call(parameter("1", 'name="a&lt;&quot;&amp;lt;&gt;b" string="true"')) == '{"a<\\"&lt;>b":"1"}'


def test_a_quoted_bracket_does_not_end_the_tag():
    assert call(parameter("1", 'name="a>b" string="true"')) == '{"a>b":"1"}'


@pytest.mark.parametrize(("body", "value"), [
    ("&lt;&gt;&amp;&quot;&apos;", "<>&\"'"), ("&amp;lt;", "&lt;"), ("&nbsp;&#60;&LT;", "&nbsp;&#60;&LT;"),
    ("&lt", "&lt"), ("&&lt;", "&<"), ("&am&amp", "&am&amp"),
])
def test_five_entities_are_decoded_once(body, value):
    assert json.loads(call(parameter(body)))["x"] == value


@pytest.mark.parametrize("value", ["1", " [1, 2]\n", '"s"', "null", "1.50", '{"a": {"b": []}}', "0" + "." + "0" * 400])
def test_json_values_pass_unchanged(value):
    assert call(parameter(value, 'name="x" string="false"')) == f'{{"x":{value}}}'


@pytest.mark.parametrize("value", ["", "yes", "{'a': 1}", "[1,]", "NaN", "-Infinity", "1 2", "[" * 500 + "]" * 500,
                                   "[" * 100_000, "9" * 5000])
def test_values_that_no_client_can_read_become_strings(value):
    assert json.loads(call(parameter(value, 'name="x" string="false"'))) == {"x": value}


def test_a_value_without_kind_is_a_string_unless_it_begins_with_a_parameter():
    assert json.loads(call(parameter(" 12 ", 'name="x"'))) == {"x": " 12 "}
    assert json.loads(call(parameter(" ", 'name="x"'))) == {"x": " "}
    assert json.loads(call(parameter("<D|parameters>", 'name="x"'))) == {"x": f"<{DSML}parameters>"}
    inner = parameter("1", 'name="a"') + "\n" + parameter("2", 'name="b" string="false"')
    assert json.loads(call(parameter("\n" + inner + "\n", 'name="x"'))) == {"x": {"a": "1", "b": 2}}


def test_parameters_nest():
    body = parameter(parameter(parameter("1", 'name="c"'), 'name="b"') + parameter("2", 'name="d"'), 'name="a"')
    assert json.loads(call(body + parameter("3"))) == {"a": {"b": {"c": "1"}, "d": "2"}, "x": "3"}


def test_the_first_of_repeated_parameters_counts_whatever_the_others_hold():
    again = parameter(parameter("2", 'name="y"') + parameter("3", 'name="y"'), 'name="x"')
    body = parameter("1") + again + parameter("[4]", 'name="x" string="false"') + parameter("5", 'name="y"')
    assert call(body) == '{"x":"1","y":"5"}'


def test_white_space_in_tags_and_between_them_is_ignored():
    text = '<D|tool_calls>\r\n\t<D|invoke\n name="run"  >\f</D|invoke >\v \n</D|tool_calls\n>'
    assert read(sampled(text)) == (("run", "{}"),)
