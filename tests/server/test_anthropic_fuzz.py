"""Requests that mean nothing: POST /v1/messages answers or says what is wrong, and never breaks."""
import copy
import json

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4mlx.server.sealed import seal

BODY = {
    "model": "claude-local", "max_tokens": 3, "stream": False, "stop_sequences": ["a"], "temperature": 1, "top_k": 5,
    "system": [{"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"}, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "tools": [{"name": "bash", "description": "Runs.", "input_schema": {"type": "object"}},
              {"name": "late", "input_schema": {}, "defer_loading": True}, {"type": "web_search_1", "name": "w"}],
    "messages": [
        {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"},
                                          {"type": "redacted_thinking", "data": "c"}, {"type": "text", "text": "d"},
                                          {"type": "tool_use", "id": "t", "name": "bash", "input": {"e": [1]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [
            {"type": "text", "text": "f"}, {"type": "tool_reference", "tool_name": "late"}]}]}]}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(["", "text", "tool_use", "tool_result", "user", "assistant", "image", "\ud800", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "text", "content", "role", "name", "id", "x"]), inner, max_size=3), max_leaves=6)


def places(value, path=()):
    """The path to every member, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.fixture(scope="module")
def clients(server):
    with httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(sorted(places(BODY), key=str)), json_values | st.just(...)), min_size=1,
                max_size=3))
def test_any_value_in_any_place_is_answered_or_refused(clients, changes):
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
            continue   # an earlier change took the place away
    answer = clients.post("/v1/messages", content=json.dumps(body).encode())
    assert answer.status_code in (200, 400), answer.text
    if body.get("stream") is not True:
        assert answer.json()["type"] == ("message" if answer.status_code == 200 else "error")


def test_thinking_of_any_length_comes_back_whole(server):
    body = copy.deepcopy(BODY)
    body["messages"][2]["content"][0] = {"type": "thinking", "thinking": "", "signature": seal("\x00思" * 300)}
    assert server.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 300 * 4
