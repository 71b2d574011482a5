"""Which tool blocks the grammar of a request's tools lets pass, tried over a vocabulary of single bytes."""
import pytest

from ds4mlx.chat import json_text
from ds4mlx.chat.messages import Tool, ToolCall
from ds4mlx.chat.syntax.dsml import render_calls
from ds4mlx.chat.syntax.grammars import answer_grammar, arguments_grammar
from ds4mlx.chat.syntax.schemas import in_schema_order
from ds4mlx.errors import BadRequest
from ds4mlx.text.grammar import Vocabulary
from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer

BYTES = Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")
VOCABULARY = Vocabulary(BYTES)
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}


def strict(properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False,
              **more}
    return Tool("run", {"name": "run", "parameters": schema}, strict=True)


def allows(tool, *arguments):
    """Whether the canonical block of calls with these arguments passes."""
    grammar = VOCABULARY.compile(answer_grammar(None, [tool], [tool.name], must_call=True), "tools")
    for token in BYTES.encode(render_calls([ToolCall("", tool.name, text) for text in arguments])):
        if not grammar.mask()[token]:
            return False
        grammar.accept(token)
    return grammar.done


VALUES = [
    ({"type": "string"}, '"a </b> \\n &amp; \u4e2d"', True), ({"type": "string"}, "3", False),
    ({"type": "string", "maxLength": 3}, '"\u4e2d\u6587x"', True),
    ({"type": "string", "maxLength": 3}, '"abcd"', False),
    ({"type": "string", "minLength": 2}, '"a"', False), ({"type": "string", "minLength": 2}, '"abc"', True),
    ({"enum": ["", "it's", 3, None]}, '"it\'s"', True), ({"enum": ["", "it's", 3, None]}, '""', True),
    ({"enum": ["", "it's", 3, None]}, "null", True), ({"enum": ["", "it's", 3, None]}, '"its"', False),
    ({"type": ["string", "null"]}, "null", True), ({"type": ["string", "null"]}, '"null"', True),
    ({"type": ["string", "null"]}, "1", False), ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", True),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"7"', True),
    ({"type": "integer", "minimum": 3}, "2", False), ({"type": "integer", "minimum": 3}, "12", True),
    ({"type": "number", "maximum": 5}, "-12.75", True), ({"type": "number", "maximum": 5}, "5.5", False),
    ({"type": "number"}, "1.5e-7", True), ({"type": "array", "items": {"type": "boolean"}}, "[true, false]", True),
    ({}, '{"any": [1, "x"]}', True),
    ({"$ref": "#/$defs/node"}, '{"next": {"next": {}}}', True), ({"$ref": "#/$defs/node"}, '{"next": 1}', False),
]


@pytest.mark.parametrize(("schema", "value", "allowed"), VALUES)
def test_a_value_passes_where_its_schema_allows_it(schema, value, allowed):
    assert allows(strict({"x": schema}, ["x"], **{"$defs": {"node": NODE}}), f'{{"x": {value}}}') is allowed


@pytest.mark.parametrize(("arguments", "allowed"), [
    ('{"b": "1"}', True), ('{"a": "1", "b": "2"}', True), ('{"b": "1", "c": "2"}', True), ('{"a": "1"}', False),
    ("{}", False), ('{"b": "1", "a": "2"}', False), ('{"b": "1", "b2": "2"}', False)])
def test_required_parameters_must_come_and_all_come_in_the_order_of_the_schema(arguments, allowed):
    text = {"type": "string"}
    assert allows(strict({"a": text, "b": text, "c": text}, ["b"]), arguments) is allowed


def keeps(tool, arguments):
    """Whether the arguments of a call that is there already keep to its schema."""
    schema = tool.schema["parameters"]
    text = json_text.spell(in_schema_order(json_text.parse(arguments), schema, schema))
    return VOCABULARY.matches(arguments_grammar(tool), text)


@pytest.mark.parametrize(("schema", "value", "allowed"), VALUES)
def test_the_same_values_keep_to_the_schema_when_they_are_there_already(schema, value, allowed):
    assert keeps(strict({"x": schema}, ["x"], **{"$defs": {"node": NODE}}), f'{{"x": {value}}}') is allowed


@pytest.mark.parametrize(("arguments", "allowed"), [
    ('{"b": {"y": 1, "x": 2}, "a": [{"y": 1, "x": 2}]}', True), ('{"a": [], "b": {"z": 1}}', True),
    ('{"b": {"x": 2}}', False), ('{"a": [], "b": {"y": 1, "x": "2"}}', False), ("[]", False),
    ('{"a": [], "c": 1}', False)])
def test_their_order_does_not_matter_then(arguments, allowed):
    numbers = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
               "additionalProperties": False}
    other = {**numbers, "properties": {"z": {"type": "integer"}}}
    tool = strict({"a": {"type": "array", "items": {"$ref": "#/$defs/n"}}, "b": {"anyOf": [numbers, other]}}, ["a"],
                  **{"$defs": {"n": numbers}})
    assert keeps(tool, arguments) is allowed


def test_a_call_without_arguments_passes_where_none_are_required():
    assert allows(strict({}), "{}") and allows(strict({"a": {}}), "{}") and not allows(strict({}), '{"a": "1"}')


@pytest.mark.parametrize(("more", "arguments", "allowed"), [
    (True, '{"a": 1, "x": "y", "z": [2]}', True), (True, '{"x": "y"}', True), (True, "{}", True),
    (True, '{"a": "no integer"}', False), ({"type": "boolean"}, '{"x": true}', True),
    ({"type": "boolean"}, '{"x": 1}', False),
    (False, '{"x": 1}', False)])
def test_parameters_that_are_not_declared_come_last_where_the_schema_allows_them(more, arguments, allowed):
    assert allows(strict({"a": {"type": "integer"}}, additionalProperties=more), arguments) is allowed


def test_a_schema_may_be_a_reference_into_itself():
    tool = Tool("run", {"name": "run", "parameters": {"$ref": "#/$defs/node", "$defs": {"node": NODE}}}, strict=True)
    assert allows(tool, '{"next": {"next": {}}}') and not allows(tool, '{"next": {"nest": {}}}')


def test_names_are_escaped_as_they_are_written():
    assert allows(strict({'<a>&"b"': {"type": "string"}}), '{"<a>&\\"b\\"": "1"}')


def test_a_tool_that_is_not_strict_takes_any_arguments():
    tool = Tool("run", {"name": "run", "parameters": {"type": "object"}})
    assert allows(tool, "{}") and allows(tool, '{"a key": "raw </b>", "l\u00e4nge": [1, {"z": null}]}', '{"x": 1}')


@pytest.mark.parametrize(("tool", "told"), [
    (strict({"a": {}}, ["b"]), "'b' is required but not among its properties"),
    (strict({"a": {"enum": []}}), 'no value is allowed for "a"'),
    (strict({"": {}}), "a parameter's name has 0 characters"),
    (strict({"a": {}}, allOf=[{"maxProperties": 1}]), "allOf stands beside its properties"),
    (strict({f"k{i}": {"items": {"$ref": "#/$defs/x"}} for i in range(200)}, **{"$defs": {"x": {"const": "x" * 5000}}}),
     "the grammar of the tools exceeds"),
])
def test_a_strict_tool_whose_arguments_cannot_be_limited_is_refused(tool, told):
    with pytest.raises(BadRequest, match=told) as refusal:
        answer_grammar(None, [tool], ["run"], must_call=True)
    assert (refusal.value.status, refusal.value.param) == (400, "tools")


def test_a_schema_nested_too_deep_is_refused():
    schema = {}
    for _ in range(70):
        schema = {"items": schema}
    with pytest.raises(BadRequest, match="nested deeper than 64"):
        answer_grammar(None, [strict({"a": schema})], ["run"], must_call=True)
