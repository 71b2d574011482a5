"""What clients do to the arguments of a tool call in passing, and what is an edit."""
import json

import pytest

from ds4mlx.sessions.rewriting import same_arguments

EDIT = {"type": "object", "properties": {
    "replace_all": {"type": "boolean", "default": False}, "mode": {"default": "fast"}, "limit": {"default": 10},
    "options": {"properties": {"depth": {"default": 2}}}, "edits": {"items": {"properties": {"n": {"default": 1}}}}}}

REWRITTEN = {
    "keys in schema order": ('{"command": "ls", "timeout": 1}', '{"timeout":1,"command":"ls"}'),
    "a float becomes an integer": ('{"timeout": 5000.0}', '{"timeout":5000}'),
    "an exponent is written out": ('{"n": 1e3}', '{"n":1000}'),
    "spacing": ('{"a": [1, {"b": 2}]}', '{"a":[1,{"b":2}]}'),
    "escapes": ('{"a": "é中"}', '{"a":"\\u00e9\\u4e2d"}'),
    "false added in front": ('{"old": "a"}', '{"replace_all":false,"old":"a"}'),
    "null added": ('{"old": "a"}', '{"old":"a","unheard_of":null}'),
    "a default added": ('{"old": "a"}', '{"old":"a","mode":"fast","limit":10.0}'),
    "a default added further in": ('{"options": {}, "edits": [{}]}', '{"options":{"depth":2},"edits":[{"n":1}]}'),
    "trailing spaces of each line": ('{"content": "a  \\n\\tb\\t\\nc "}', '{"content":"a\\n\\tb\\nc"}'),
    "lines end as on Unix": ('{"content": "a\\r\\nb"}', '{"content":"a\\nb"}'),
    "input that could not be read": ("{broken", json.dumps({"__unparsedToolInput": {"raw": "{broken", "len": 7}})),
    "text that is no JSON, untouched": ("{broken", "{broken"),
}

EDITED = {
    "another value": ('{"command": "ls"}', '{"command":"rm"}'),
    "a key removed": ('{"a": 1, "b": null}', '{"a":1}'),
    "a key added": ('{"a": 1}', '{"a":1,"b":1}'),
    "true added, which is no default": ('{"old": "a"}', '{"old":"a","replace_all":true}'),
    "an empty string added": ('{"old": "a"}', '{"old":"a","new":""}'),
    "white space in front of a line": ('{"content": "a\\n b"}', '{"content":"a\\nb"}'),
    "white space inside a line": ('{"content": "a  b"}', '{"content":"a b"}'),
    "the last line end gone": ('{"content": "a\\n"}', '{"content":"a"}'),
    "an order of a list": ('{"a": [1, 2]}', '{"a":[2,1]}'),
    "a list cut": ('{"a": [1, 2]}', '{"a":[1]}'),
    "a number as text": ('{"a": 1}', '{"a":"1"}'),
    "a truth as a number": ('{"a": true}', '{"a":1}'),
    "zero for false": ('{"a": 0}', '{"a":false}'),
    "null for false": ('{"a": null}', '{"a":false}'),
    "the last of 20 digits": ('{"a": 12345678901234567890}', '{"a":12345678901234567891}'),
    "another raw text": ("{broken", json.dumps({"__unparsedToolInput": {"raw": "{mended", "len": 7}})),
    "unreadable input emptied": ("{broken", "{}"),
    "no number at all": ('{"a": 1}', '{"a": NaN}'),
    "an object for a list": ('{"a": {}}', '{"a":[]}'),
}


@pytest.mark.parametrize("sampled, returned", REWRITTEN.values(), ids=REWRITTEN)
def test_rewriting_of_clients_is_no_edit(sampled, returned):
    assert same_arguments(sampled, returned, EDIT)


@pytest.mark.parametrize("sampled, returned", EDITED.values(), ids=EDITED)
def test_an_edit_is_seen(sampled, returned):
    assert not same_arguments(sampled, returned, EDIT)


HOSTILE = ["[" * 100_000, '{"a": ' * 900 + "1" + "}" * 900, "9" * 5000, '{"a": 1e999999999}']


@pytest.mark.parametrize("returned", HOSTILE)
def test_hostile_arguments_are_only_different(returned):
    assert not same_arguments('{"a": 1}', returned)
    assert not same_arguments(returned, '{"a": 1}')


@pytest.mark.parametrize("schema", [None, {}, {"properties": []}, {"properties": {"b": 7}}, {"items": 3}])
def test_a_schema_of_another_shape_gives_no_defaults(schema):
    assert same_arguments('{"a": [1]}', '{"a":[1.0],"b":null}', schema)
    assert not same_arguments('{"a": [1]}', '{"a":[1],"b":7}', schema)
