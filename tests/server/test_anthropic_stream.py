"""What a client of POST /v1/messages receives: transcripts written by hand, and the same answer whole."""
import json
import re
from pathlib import Path

import pytest

from ds4mlx.engine.stub import Gate
from ds4mlx.server.sealed import unseal

GOLDENS = dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)",
                          (Path(__file__).parents[1] / "data" / "anthropic_sse.txt").read_text("utf-8"), re.M))
TOOLS = [{"name": name, "description": f"{name} it", "input_schema": {"type": "object", "properties": {}}}
         for name in ("bash", "read")]


def call(name, **arguments):
    parameters = "".join(f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                         f'{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n'
                         for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def block(*calls):
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(calls) + "</｜DSML｜tool_calls>"


OFF, ON = {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}
# name -> (the model's text, fields of the request)
CASES = {
    "text": ("Hello, 世界.", OFF),
    "thinking": ("Let me see.</think>Done.", ON),
    "thinking omitted": ("Let me see.</think>Done.", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    "tool": ("I look." + block(call("bash", command='echo "ä" <b>\n', timeout=5000.0)), OFF | {"tools": TOOLS}),
    "parallel tools": ("both</think>" + block(call("bash", command="ls"), call("read")), ON | {"tools": TOOLS}),
    "length": ("Hello", OFF | {"max_tokens": 3}),
    "length in thinking": ("Let me see.</think>Done.", ON | {"max_tokens": 3}),
    "stop sequence": ("one STOP two", OFF | {"stop_sequences": ["never", "STOP"]}),
    "empty": ("", OFF),
}


def body(**fields):
    return {"model": "claude-local", "max_tokens": 1000, "messages": [{"role": "user", "content": "Hi"}], **fields}


def stream(server, **fields):
    """The events of an answer, by their data; comments are for other eyes."""
    text = server.post("/v1/messages", json=body(stream=True, **fields)).text
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    for frame in frames:
        name, data = re.fullmatch("event: (.*)\ndata: (.*)", frame).groups()
        assert json.loads(data)["type"] == name
    return [json.loads(frame.partition("data: ")[2]) for frame in frames]


def joined(events):
    """Events with neighbouring deltas of one kind made one: how finely an answer is cut depends on time."""
    result = []
    for event in events:
        delta, last = event.get("delta", {}), result[-1].get("delta", {}) if result else {}
        if event["type"] == "content_block_delta" and delta["type"] == last.get("type"):
            key = list(delta)[1]
            last[key] += delta[key]
        else:
            result.append(event)
    return result


def transcript(events, golden):
    """Events as the goldens are written. A prompt with tools is long: there, counts are left open."""
    text = ""
    for event in joined(events):
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        text += f"event: {event['type']}\ndata: {data}\n\n"
    text = re.sub(r'"(msg|toolu)_[0-9a-f]+"', r'"\1_ID"', text)
    text = re.sub(r'"(ds4r1\.[^"]+)"', lambda sealed: f'"SEALED {unseal(sealed[1])}"', text)
    if "PROMPT" in golden:
        text = re.sub(r'(creation_input_tokens":)\d+', r"\1PROMPT", text)
        text = re.sub(r'(output_tokens":)[1-9]\d*', r"\1ANSWER", text)
    return text


def assembled(events):
    """The message that a client makes of a stream."""
    message, pieces = {}, {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pieces[event["index"]] = ""
            case "content_block_delta":
                for key, piece in list(event["delta"].items())[1:]:
                    if key == "partial_json":
                        pieces[event["index"]] += piece
                    else:
                        message["content"][event["index"]][key] += piece
            case "content_block_stop" if pieces[event["index"]]:
                message["content"][event["index"]]["input"] = json.loads(pieces[event["index"]])
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def without_chance(message):
    """A message without ids, and with its prompt's tokens as one number: a second request finds them cached."""
    usage = message["usage"]
    prompt = sum(usage.pop(key) for key in list(usage) if "input" in key)
    content = [{key: value for key, value in part.items() if key != "id"} for part in message["content"]]
    return message | {"id": None, "content": content, "usage": usage | {"prompt": prompt}}


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_as_written_down(serve, name):
    answer, fields = CASES[name]
    assert transcript(stream(serve(answer), **fields), GOLDENS[name]) == GOLDENS[name]


@pytest.mark.parametrize("name", CASES)
def test_a_stream_adds_up_to_the_whole_answer(serve, name):
    answer, fields = CASES[name]
    server = serve(answer)
    streamed, whole = assembled(stream(server, **fields)), server.post("/v1/messages", json=body(**fields)).json()
    assert without_chance(streamed) == without_chance(whole)


def test_a_failure_within_a_stream_is_an_error_event_and_nothing_more(serve):
    server = serve()
    fail_at(server, 3)
    assert transcript(stream(server, **OFF), GOLDENS["error"]) == GOLDENS["error"]


def test_the_same_failure_of_a_whole_answer_is_a_500_with_the_same_error(serve):
    server = serve()
    fail_at(server, 3)
    failed = server.post("/v1/messages", json=body(**OFF))
    assert failed.status_code == 500 and failed.json()["type"] == "error"
    assert json.dumps(failed.json()["error"], separators=(",", ":")) in GOLDENS["error"]


def fail_at(server, wanted):
    steps = iter(range(100))

    def fail():
        if next(steps) == wanted:
            raise ArithmeticError("logits are not finite")

    server.stub.before_decode = fail


def test_every_number_of_a_call_is_as_the_model_wrote_it(serve):
    server = serve(block('<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="n" string="false">'
                         '[1e999, 12345678901234567890, 5000.0, "\\ud800"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'))
    whole = server.post("/v1/messages", json=body(tools=TOOLS, **OFF))
    assert '{"n": [1e999, 12345678901234567890, 5000.0, "\ufffd"]}' in whole.text


def test_a_call_that_was_cut_is_not_in_the_whole_answer(serve):
    server = serve(block(call("bash", command="ls"), call("read", path="a" * 500)))
    whole = server.post("/v1/messages", json=body(tools=TOOLS, **OFF | {"max_tokens": 400})).json()
    assert [part["name"] for part in whole["content"]] == ["bash"] and whole["stop_reason"] == "max_tokens"


def test_ids_are_anthropics_and_differ(serve):
    message = serve(CASES["parallel tools"][0]).post("/v1/messages", json=body(tools=TOOLS)).json()
    calls = [part["id"] for part in message["content"] if part["type"] == "tool_use"]
    assert message["id"].startswith("msg_") and len(set(calls)) == 2
    assert all(re.fullmatch("toolu_[0-9a-f]{32}", id) for id in calls)


@pytest.mark.parametrize("beta, reason", [("", "max_tokens"), ("a,model-context-window-exceeded-2025-08-26",
                                                              "model_context_window_exceeded")])
def test_a_full_context_is_named_to_clients_that_know_the_name(serve, beta, reason):
    server = serve("x" * 500, settings={"ctx": 64})
    answer = server.post("/v1/messages", json=body(**OFF), headers={"anthropic-beta": beta} if beta else {})
    assert answer.json()["stop_reason"] == reason


def test_nothing_but_comments_before_the_cache_decision_and_pings_after_it(serve):
    server, gate = serve(settings={"sse_keepalive_seconds": 0.02}), Gate()
    server.stub.before_prefill = gate
    with server.client.stream("POST", "/v1/messages", json=body(stream=True, **OFF)) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": waiting"
        seen = [line for line in (next(lines) for _ in range(20)) if line]
        gate.opened.set()
        rest = list(lines)
    assert [line for line in seen if line.startswith("event")][:3] == ["event: message_start", *["event: ping"] * 2]
    assert rest[-3] == "event: message_stop"


def test_a_queued_stream_has_its_head_at_once_and_comments_while_it_waits(serve):
    server, gate = serve(settings={"sse_keepalive_seconds": 0.02}), Gate()
    server.stub.before_decode = gate
    with server.client.stream("POST", "/v1/messages", json=body(stream=True, **OFF)) as first:
        assert gate.reached.wait(60)
        with server.client.stream("POST", "/v1/messages", json=body(stream=True, **OFF)) as second:
            lines = second.iter_lines()
            assert {next(lines) for _ in range(8)} == {": queued, place 1", ": waiting", ""}
            gate.opened.set()
            assert list(lines)[-3] == "event: message_stop"
        first.read()


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "bash"}, {"type": "any"}])
def test_a_call_that_must_come_comes_whatever_the_model_would_say(serve, choice):
    said = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"bash\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    server = serve("Hello." + said[len("Hello."):])   # in other words than a call, at first
    message = server.post("/v1/messages", json=body(tools=TOOLS, tool_choice=choice, **OFF)).json()
    assert [part["type"] for part in message["content"]] == ["tool_use"], message
    assert (message["content"][0]["name"], message["stop_reason"]) == ("bash", "tool_use")


def test_a_begun_answer_is_gone_on_with_without_thinking(serve):
    begun = {"messages": [{"role": "user", "content": "Six times seven?"}, {"role": "assistant", "content": "It is"}]}
    message = serve(" 42.").post("/v1/messages", json=body(**ON) | begun).json()
    assert message["content"] == [{"type": "text", "text": " 42."}]
