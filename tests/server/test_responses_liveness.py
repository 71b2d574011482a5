"""Silence and what came before: what a client of POST /v1/responses must not have to wait for."""
import json

import pytest

from ds4mlx.engine.stub import Gate

HI = {"input": "Hi", "reasoning": {"effort": "none"}, "stream": True}


def events_of(lines):
    return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def test_a_blocked_prefill_is_bridged_by_events_that_count_on(serve):
    """Some clients count events, not bytes: a comment would not keep them."""
    server, gate = serve(settings={"sse_keepalive_seconds": 0.02}), Gate()
    server.stub.before_prefill = gate
    with server.client.stream("POST", "/v1/responses", json=HI) as answer:
        events = events_of(answer.iter_lines())
        first = [next(events) for _ in range(5)]
        gate.opened.set()
        rest = list(events)
    assert [event["type"] for event in first] == ["response.created", *["response.in_progress"] * 4]
    assert [event["sequence_number"] for event in first + rest] == list(range(len(first + rest)))
    assert rest[-1]["type"] == "response.completed"


def test_a_pause_between_two_tokens_is_bridged_too(serve):
    server, gate, steps = serve(settings={"sse_keepalive_seconds": 0.02}), Gate(), iter(range(100))
    server.stub.before_decode = lambda: gate() if next(steps) == 3 else None
    with server.client.stream("POST", "/v1/responses", json=HI) as answer:
        kinds = []
        for event in events_of(answer.iter_lines()):
            kinds.append(event["type"])
            if kinds[-1] == "response.in_progress" and "response.output_text.delta" in kinds:
                gate.opened.set()
    assert gate.opened.is_set() and kinds[-1] == "response.completed"


PATCH = {"type": "custom", "name": "patch", "description": "Edits files. " * 20}
SPACE = {"type": "namespace", "name": "files", "tools": [
    {"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}, "strict": False}]}
CALLS = """Look.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="patch">
<｜DSML｜parameter name="input" string="true">*** "a"
+\\n</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="list">
<｜DSML｜parameter name="all" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
USER = {"role": "user", "content": "List"}
SHAPES = {"nothing of the reasoning": {}, "a summary": {"reasoning": {"summary": "auto"}},
          "sealed reasoning": {"include": ["reasoning.encrypted_content"], "store": False}}


@pytest.fixture
def boot(start_server, stop_server, tmp_path, tokenizer):
    """boot(): a server over one directory of states, after the one before has stopped. It calls, then says "Done."."""
    running = []

    def answer(prompt):
        said = "Done." if "<tool_result>" in tokenizer.decode(prompt) else CALLS
        return tokenizer.encode_marked("plan</think>" + said)

    def start():
        while running:
            stop_server(running.pop())
        running.append(start_server(script=answer, settings={"kv_disk_dir": tmp_path / "kv", "ctx": 16384}))
        return running[0]

    yield start
    while running:
        stop_server(running.pop())


def ask(server, items, **fields):
    answer = server.post("/v1/responses", json={"input": items, "tools": [PATCH, SPACE], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json(), answer.headers["x-ds4mlx-cache-source"]


def results_of(response):
    outputs = {"custom_tool_call": "custom_tool_call_output", "function_call": "function_call_output"}
    return [{"type": outputs[item["type"]], "call_id": item["call_id"], "output": "ok"}
            for item in reversed(response["output"]) if item["type"] in outputs]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_turn_after_a_call_computes_only_its_results(boot, shape, restart):
    server = boot()
    first, _ = ask(server, [USER], **SHAPES[shape])
    server = boot() if restart else server
    items = [{key: value for key, value in item.items() if key != "id"} for item in first["output"]]
    second, source = ask(server, [USER, *items, *results_of(first)], **SHAPES[shape])
    assert source == ("disk-text" if restart else "responses-visible")
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] + 1
    third, source = ask(server, [USER, *items, *results_of(first), *second["output"], USER], **SHAPES[shape])
    assert third["usage"]["input_tokens_details"]["cached_tokens"] == second["usage"]["total_tokens"] + 1
