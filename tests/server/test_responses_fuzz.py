"""Requests that mean nothing: POST /v1/responses answers or says what is wrong, and never breaks."""
import copy
import json

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BODY = {
    "model": "m", "instructions": "Help.", "max_output_tokens": 3, "temperature": 1, "stream": False, "store": True,
    "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, "tool_choice": "auto",
    "parallel_tool_calls": True, "truncation": "auto", "previous_response_id": None,
    "tools": [{"type": "function", "name": "bash", "description": "Runs.", "parameters": {"type": "object"}},
              {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
              {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "list"}]},
              {"type": "tool_search", "execution": "client", "parameters": {}}, {"type": "web_search"}],
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "encrypted_content": "ds4r1.x.y",
         "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "c1", "name": "list", "namespace": "ns", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "tool_search_call", "call_id": "c3", "execution": "client", "arguments": {"query": "q"}},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "d"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": {"e": 1}},
        {"type": "tool_search_output", "call_id": "c3", "tools": [{"type": "function", "name": "found"}]},
        {"role": "user", "content": "Hi"}]}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(["", "reasoning", "item_reference", "mcp_call", "x_output", "user", "\ud800", "required"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "text", "content", "role", "name", "id", "call_id", "output"]), inner, max_size=3),
    max_leaves=6)


def places(value, path=()):
    """The path to every member, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(changes):
    """BODY with other values, or none, in some places."""
    body = copy.deepcopy(BODY)
    for (*path, last), value in changes:
        place = body
        try:
            for key in path:
                place = place[key]
            if value is ...:
                del place[last]
            else:
                place[last] = value
        except (KeyError, IndexError, TypeError):
            pass   # an earlier change took the place away
    return body


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(sorted(places(BODY), key=str)), json_values | st.just(...)), min_size=1,
                max_size=3))
def test_any_value_in_any_place_is_answered_or_refused(client, changes):
    answer = client.post("/v1/responses", content=json.dumps(changed(changes)).encode())
    assert answer.status_code in (200, 400, 404, 409)
    if "text/event-stream" in answer.headers["content-type"]:
        assert "event: response.incomplete" in answer.text or "event: response.completed" in answer.text
    elif answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_sent_back_is_replaced(client, stream):
    fields = {"instructions": "\ud800", "metadata": {"\udfff": "a"}, "max_output_tokens": 3, "stream": stream}
    answer = client.post("/v1/responses", content=json.dumps({"input": "Hi", **fields}).encode())
    assert answer.status_code == 200 and "\ufffd" in answer.text
