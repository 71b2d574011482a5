"""Calls and formats that a request insists on, over HTTP."""
import json

import pytest

DEPTH = {"type": "object", "properties": {"depth": {"type": "integer", "minimum": 1, "maximum": 9}},
         "required": ["depth"], "additionalProperties": False}
LS = {"type": "function", "function": {"name": "ls", "parameters": DEPTH, "strict": True}}
NAMED = {"type": "function", "function": {"name": "ls"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_answered_with_a_call_that_keeps_its_schema(server, choice):
    answer = server.chat(tools=[LS], tool_choice=choice, parallel_tool_calls=False)["choices"][0]
    call, = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], call["function"]["name"]) == ("tool_calls", "ls")
    assert json.loads(call["function"]["arguments"])["depth"] in range(1, 10)


def test_the_pieces_of_a_forced_call_join_to_the_same_arguments(server):
    request = {"tools": [LS], "tool_choice": NAMED, "parallel_tool_calls": False, "temperature": 0}
    deltas = [choice["delta"] for event in server.events(**request)[:-1] for choice in event["choices"]]
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    call, = server.chat(**request)["choices"][0]["message"]["tool_calls"]
    assert "".join(pieces) == call["function"]["arguments"]


def test_a_format_is_kept_whatever_the_model_would_say(server):
    form = {"type": "json_schema", "json_schema": {"name": "d", "strict": True, "schema": DEPTH}}
    message = server.chat(response_format=form)["choices"][0]["message"]
    assert json.loads(message["content"])["depth"] in range(1, 10)


def test_a_schema_that_cannot_be_kept_is_an_error_that_names_the_field(server):
    form = {"type": "json_schema", "json_schema": {"name": "d", "strict": True, "schema": {"not": {}}}}
    fault = server.post(json={"messages": [{"role": "user", "content": "Hi"}], "response_format": form})
    assert (fault.status_code, fault.json()["error"]["param"]) == (400, "response_format")


def test_a_strict_tool_that_cannot_be_limited_is_an_error_that_names_it(server):
    tool = {"type": "function", "function": {"name": "ls", "strict": True, "parameters": {"oneOf": [DEPTH, DEPTH]}}}
    fault = server.post(json={"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})
    assert fault.status_code == 400 and "'ls' is strict, but oneOf" in fault.json()["error"]["message"]
