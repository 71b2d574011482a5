"""What the four agents send and rely on, where no other test has it: whole first requests, hints, and hard endings."""
import json
import logging
import threading

import pytest
from waiting import idle, read_until, until

from ds4mlx.config import Settings
from ds4mlx.engine.stub import Gate

SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
          "properties": {"command": {"type": "string", "description": "A `line` of \"shell\", <tagged>;\n中文"},
                         "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 9, "default": 5}},
          "required": ["command"]}
SHELL = {"name": "bash", "description": "Runs.", "parameters": SCHEMA}
MARK = {"cache_control": {"type": "ephemeral"}}
# client -> path and first request, as it was seen to send it
FIRST = {
    "claude": ("/v1/messages?beta=true", {
        "model": "x", "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive", "display": "updates"},
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.a1b;"},
                   {"type": "text", "text": "You are an agent.", **MARK}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                     {"role": "system", "content": [{"type": "text", "text": "It is Monday.", **MARK}]}],
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": SCHEMA},
                  {"name": "Later", "description": "", "input_schema": SCHEMA, "defer_loading": True}],
        "output_config": {"effort": "high"}, "metadata": {"user_id": '{"session_id": "s"}'}, "safeguards": {"git": {}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    "codex": ("/v1/responses", {
        "model": "x", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "s",
        "client_metadata": {"installation": "i"},
        "input": [{"type": "message", "id": "m1", "role": role, "content": [{"type": "input_text", "text": "Hi"}]}
                  for role in ("developer", "developer", "user", "user")],
        "tools": [{"type": "function", "strict": False, **SHELL}, {"type": "web_search", "external_web_access": False},
                  {"type": "namespace", "name": "files", "description": "", "tools": [
                      {"type": "function", "strict": False, **SHELL}]}]}),
    "opencode": ("/v1/chat/completions", {
        "model": "x", "max_tokens": 32000, "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "\"Hi\""}],
        "tools": [{"type": "function", "function": SHELL}], "tool_choice": "auto"}),
    "pi": ("/v1/chat/completions", {
        "model": "x", "max_completion_tokens": 4096, "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "You are an agent."},
                     {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [{"type": "function", "function": {**SHELL, "strict": False}}], "store": False,
        "reasoning_effort": "medium"}),
    "pi, messages": ("/v1/messages", {
        "model": "x", "max_tokens": 4096, "stream": True, "system": [{"type": "text", "text": "You are.", **MARK}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]}]}),
    "pi, responses": ("/v1/responses", {
        "model": "x", "max_output_tokens": 4096, "stream": True, "store": False, "prompt_cache_key": "s",
        "input": [{"role": "system", "content": "You are."}, {"role": "user", "content": [
            {"type": "input_text", "text": "Hi"}]}]}),
}
ENDS = {"/v1/messages": '"type":"message_stop"', "/v1/responses": '"type":"response.completed"',
        "/v1/chat/completions": "[DONE]"}
ASKED = {path: body for path, body in FIRST.values()}    # one of each API


@pytest.fixture(scope="module")
def server(start_server, stop_server):
    shared = start_server("So.</think>Hello.")
    yield shared
    stop_server(shared)


@pytest.mark.parametrize("client", FIRST)
def test_a_first_request_as_the_client_sends_it_is_answered_to_its_end(server, client):
    path, body = FIRST[client]
    with server.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert ENDS[path.partition("?")[0]] in data[-1] and any('"usage":{' in event for event in data)


@pytest.mark.parametrize("client", FIRST)
def test_the_same_request_without_a_stream_is_answered_too(server, client):
    path, body = FIRST[client]
    answer = server.post(path, json=body | {"stream": False})
    assert answer.status_code == 200 and "Hello." in answer.text and answer.json()["usage"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_is_busy_says_when_to_come_again_in_every_api(serve, connect, path, stream):
    server, gate = serve(settings={"max_queue": 1}), Gate()
    server.stub.before_prefill = gate
    waiting = [connect(server, stream=True) for _ in range(2)]
    for client in waiting:
        read_until(client, b'"role"')
    refused = server.post(path, json=ASKED[path] | {"stream": stream})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")   # Codex ends for good without it
    gate.opened.set()
    for client in waiting:
        read_until(client, b"[DONE]")


@pytest.mark.parametrize("path", ASKED)
def test_a_prompt_that_is_too_long_is_told_in_the_words_of_every_api(serve, path):
    refused = serve(settings={"ctx": 8}).post(path, json=ASKED[path])
    told = refused.json()["error"]
    if path.startswith("/v1/messages"):
        assert told["type"] == "invalid_request_error"
        assert told["message"] == f"prompt is too long: {told['n_prompt_tokens']} tokens > 8 maximum"
    else:
        assert told["code"] == "context_length_exceeded" and "maximum context length is 8 tokens" in told["message"]
    assert refused.status_code == 400


@pytest.mark.parametrize("client, header", [("codex", "session-id"), ("opencode", "x-session-id"),
                                            ("opencode", "x-session-affinity"), ("claude", "x-claude-code-session-id")])
def test_a_session_that_a_header_names_is_a_hint_for_its_slot(serve, client, header):
    server, gate = serve(), Gate()
    server.stub.before_prefill = gate
    path, body = FIRST[client]
    with server.client.stream("POST", path, json=body, headers={header: "the-session"}) as answer:
        assert gate.reached.wait(60)
        request, = server.service.scheduler.requests
        assert "the-session" in request.hints
        gate.opened.set()
        answer.read()


def test_twelve_counts_at_once_are_answered_while_a_prompt_is_computed(serve, connect):
    server, gate = serve(), Gate()
    server.stub.before_prefill = gate
    busy, counts = connect(server, stream=True), []
    assert gate.reached.wait(60)
    body = {name: FIRST["claude"][1][name] for name in ("model", "messages", "tools")}
    threads = [threading.Thread(target=lambda: counts.append(
        server.post("/v1/messages/count_tokens?beta=true", json=body).json()["input_tokens"])) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 12 and len(set(counts)) == 1
    gate.opened.set()
    read_until(busy, b"[DONE]")


@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_goes_with_the_last_event_is_nothing_to_report(serve, caplog, path):
    server = serve()
    with caplog.at_level(logging.WARNING), server.client.stream("POST", path, json=ASKED[path]) as answer:
        next(line for line in answer.iter_lines() if ENDS[path.partition("?")[0]] in line)
    until(lambda: idle(server))
    assert server.chat()["choices"][0]["message"]["content"] == "Hello." and not caplog.records


def result(id):
    return {"role": "tool", "tool_call_id": id, "content": f"of {id}"}


def test_results_of_a_chat_request_may_come_in_any_order(serve):
    server = serve(settings={"diagnostics": True})
    calls = [{"id": id, "type": "function", "function": {"name": "bash", "arguments": "{}"}} for id in ("a", "b")]
    head = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    texts = {server.post("/tokenize", json={"messages": [*head, *results]}).json()["text"]
             for results in ((result("a"), result("b")), (result("b"), result("a")))}
    assert len(texts) == 1 and "of a" in texts.pop()


@pytest.mark.parametrize("arguments", ["{broken", "", "[1]", '{"a": 1,}'])
def test_arguments_that_are_no_json_come_back_without_being_refused(server, arguments):
    call = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": arguments}
    items = [{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": "c", "output": "no"}]
    assert server.post("/v1/responses", json={"input": items}).status_code == 200
    made = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    said = [items[0], {"role": "assistant", "content": None, "tool_calls": [made]}, result("c")]
    assert server.post(json={"messages": said}).status_code == 200


def test_names_of_sessions_and_items_leave_the_prompt_as_it_is(server):
    body = FIRST["codex"][1] | {"stream": False}
    plain = json.loads(json.dumps(body))
    for item in plain["input"]:
        del item["id"]
    bodies = [plain, body, body | {"prompt_cache_key": "t", "client_metadata": {"x": 1}, "metadata": {"a": "b"}}]
    cached = [server.post("/v1/responses", json=body).json()["usage"] for body in bodies]
    assert all(used["input_tokens_details"]["cached_tokens"] == used["input_tokens"] for used in cached[1:])


def test_the_default_sign_of_life_comes_before_any_client_gives_up():
    assert 0 < Settings().sse_keepalive_seconds <= 60
