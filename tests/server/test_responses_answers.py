"""What a client of POST /v1/responses receives: the life cycle of its events, and the same response whole."""
import json
import re
from pathlib import Path

import openai
import pytest

from ds4mlx.chat.events import ToolArgsDelta, ToolCallEnd, ToolCallStart
from ds4mlx.chat.messages import Tool
from ds4mlx.server.responses_events import Asked, ResponseWriter
from ds4mlx.server.responses_tools import WireTool, WireTools
from ds4mlx.server.sealed import unseal

GOLDENS = dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)",
                          (Path(__file__).parents[1] / "data" / "responses_sse.txt").read_text("utf-8"), re.M))
FUNCTIONS = [{"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
             for name in ("bash", "read")]
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
SPACE = {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "list"}]}


def call(name, **arguments):
    parameters = "".join(f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n'
                         for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def block(*calls):
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(calls) + "</｜DSML｜tool_calls>"


OFF = {"reasoning": {"effort": "none"}}
SUMMARY, SEALED = {"reasoning": {"summary": "auto"}}, {"include": ["reasoning.encrypted_content"]}
THOUGHT = "Let me see.</think>"

# name -> (the model's text, fields of the request)
CASES = {
    "text": ("Hello, 世界.", OFF),
    "reasoning": (THOUGHT + "Done.", SUMMARY),
    "sealed": (THOUGHT + "Done.", SEALED),
    "summary and sealed": (THOUGHT + "Done.", {**SUMMARY, **SEALED}),
    "hidden reasoning": (THOUGHT + "Done.", {}),
    "unclosed reasoning": ("Hm", {**SUMMARY, "max_output_tokens": 2}),
    "tool": ("I look." + block(call("bash", command='echo "ä" <b>\n')), {"tools": FUNCTIONS, **OFF}),
    "parallel tools": (THOUGHT + block(call("bash", command="ls"), call("read", path="a")),
                       {"tools": FUNCTIONS, **SUMMARY, **SEALED}),
    "namespace": (block(call("list", path="a")), {"tools": [SPACE], **OFF}),
    "custom tool": (block(call("patch", input='*** Begin\n+"a" \\u\t🦙\n')), {"tools": [PATCH], **OFF}),
    "tool search": (block(call("tool_search", query="files")), {"tools": [SEARCH], **OFF}),
    "length": ("Hello", {"max_output_tokens": 3, **OFF}),
    "length in a call": (block(call("bash", command="ls")), {"tools": FUNCTIONS, "max_output_tokens": 45, **OFF}),
    "stop string": ("one STOP two", {"stop": ["STOP"], **OFF}),
    "empty": ("", OFF),
}


def body(content="Hi", **fields):
    return {"input": content, **fields}


def stream(server, content="Hi", **fields):
    """The events of a stream as (type, data)."""
    with server.client.stream("POST", "/v1/responses", json=body(content, stream=True, **fields)) as answer:
        assert answer.status_code == 200, answer.read()
        text = answer.read().decode()
    return parsed(text)


def parsed(text):
    frames = [frame.split("\n") for frame in text.split("\n\n")[:-1]]
    events = [(head.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for head, data in frames]
    assert all(kind == data["type"] for kind, data in events)
    return events


def whole(server, content="Hi", **fields):
    answer = server.post("/v1/responses", json=body(content, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def assembled(events):
    """The items that the pieces of a stream add up to, without those that come whole."""
    items = {}
    for kind, data in events:
        item = items.get(data.get("output_index"))
        match kind:
            case "response.output_item.added":
                items[data["output_index"]] = json.loads(json.dumps(data["item"]))
            case "response.content_part.added":
                item["content"].append(dict(data["part"]))
            case "response.output_text.delta":
                item["content"][data["content_index"]]["text"] += data["delta"]
            case "response.reasoning_summary_part.added":
                item["summary"].append(dict(data["part"]))
            case "response.reasoning_summary_text.delta":
                item["summary"][data["summary_index"]]["text"] += data["delta"]
            case "response.function_call_arguments.delta":
                item["arguments"] += data["delta"]
            case "response.custom_tool_call_input.delta":
                item["input"] += data["delta"]
            case "response.output_item.done":
                assert item["id"] == data["item"]["id"]
                item["status"] = data["item"]["status"]
                for late in ("encrypted_content", *(("arguments",) if item["type"] == "tool_search_call" else ())):
                    if late in data["item"]:
                        item[late] = data["item"][late]
    return [items[index] for index in sorted(items)]


def nameless(value):
    """Without what differs from one answer to the next: ids, times, and what the cache had."""
    text = re.sub(r'"(resp|msg|rs|fc|ctc|tsc|call)_[0-9a-f]+"', r'"\1_"', json.dumps(value, ensure_ascii=False))
    value = json.loads(re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text))
    if value.get("usage"):
        del value["usage"]["input_tokens_details"], value["ds4mlx"]
    return value


@pytest.mark.parametrize("name", CASES)
def test_a_stream_ends_with_the_response_that_its_pieces_add_up_to(serve, name):
    answer, fields = CASES[name]
    server = serve(answer)
    events = stream(server, **fields)
    last = events[-1][1]["response"]
    assert assembled(events) == last["output"]
    assert nameless(last) == nameless(whole(server, **fields))


@pytest.mark.parametrize("name", CASES)
def test_events_are_numbered_from_zero_and_name_their_items(serve, name):
    answer, fields = CASES[name]
    events = stream(serve(answer), **fields)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    ids = {data["output_index"]: data["item"]["id"] for kind, data in events if kind == "response.output_item.added"}
    assert all(data["item_id"] == ids[data["output_index"]] for _, data in events if "item_id" in data)
    assert list(ids) == list(range(len(ids)))


def joined(events):
    """Events with neighbouring deltas made one: how finely an answer is cut depends on time."""
    result = []
    for kind, data in events:
        if result and kind == result[-1][0] and "delta" in data:
            result[-1][1]["delta"] += data["delta"]
        else:
            result.append((kind, dict(data)))
    return result


def transcript(events):
    """Events as the goldens are written: of a response, how far it is."""
    lines = []
    for kind, data in joined(events):
        shown = {key: value for key, value in data.items() if key not in ("type", "sequence_number")}
        if "response" in data:
            shown = {"response": {key: data["response"][key] for key in ("status", "error", "incomplete_details")
                                  if data["response"][key] is not None}}
        lines.append(f"{kind} {json.dumps(shown, ensure_ascii=False, separators=(',', ':'))}\n")
    text = re.sub(r'"(msg|rs|fc|ctc|call)_[0-9a-f]+"', r'"\1_ID"', "".join(lines))
    return re.sub(r'"(ds4r1\.[^"]+)"', lambda sealed: f'"SEALED {unseal(sealed[1])}"', text)


@pytest.mark.parametrize("name", sorted(GOLDENS.keys() - {"error"}))
def test_a_stream_is_the_transcript_written_by_hand(serve, name):
    answer, fields = CASES[name]
    assert transcript(stream(serve(answer), **fields)) == GOLDENS[name]


@pytest.mark.parametrize("name, status", [("text", "completed"), ("stop string", "completed"), ("tool", "completed"),
                                          ("empty", "completed"), ("length", "incomplete"),
                                          ("length in a call", "incomplete"), ("unclosed reasoning", "incomplete")])
def test_the_last_event_says_how_the_answer_ended(serve, name, status):
    answer, fields = CASES[name]
    kind, data = stream(serve(answer), **fields)[-1]
    assert (kind, data["response"]["status"]) == (f"response.{status}", status)
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert data["response"]["incomplete_details"] == details
    assert all(item["status"] == status for item in data["response"]["output"][-1:])


def test_a_failure_within_a_stream_is_response_failed_with_what_was_said(serve):
    steps, server = iter(range(100)), serve()
    server.stub.before_decode = lambda: _fail() if next(steps) == 3 else None
    events = stream(server, **OFF)
    assert transcript(events) == GOLDENS["error"]
    assert events[-1][1]["response"]["output"] == assembled(events)


def test_a_failure_before_anything_was_sent_is_a_500(serve):
    server = serve()
    server.stub.before_decode = _fail
    answer = server.post("/v1/responses", json=body())
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"


def _fail():
    raise ArithmeticError("logits are not finite")


def test_a_call_carries_its_namespace_beside_its_bare_name(serve):
    answer, fields = CASES["namespace"]
    item, = whole(serve(answer), **fields)["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "list", "mcp__files__")
    assert json.loads(item["arguments"]) == {"path": "a"} and item["call_id"].startswith("call_")


def test_a_custom_call_carries_plain_text(serve):
    answer, fields = CASES["custom tool"]
    item, = whole(serve(answer), **fields)["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", '*** Begin\n+"a" \\u\t🦙\n')


@pytest.mark.parametrize("arguments, text", [
    ('{"input": "a\\n\\u00e4\\ud83e\\udd99\\"\\\\"}', 'a\nä🦙"\\'), ('{"input": ""}', ""), ("{}", "{}"),
    ('{"input": {"a": 1}}', '{"a": 1}'), ('{"patch": "text"}', "text"), ('{"input": "a", "more": 1}', "a")])
def test_a_custom_call_is_streamed_in_whatever_pieces_it_comes(arguments, text):
    for size in range(1, len(arguments) + 1):
        writer = ResponseWriter(Asked("m", {}, WireTools((WireTool(Tool("patch", {}), "custom", "patch"),))))
        pieces = [ToolArgsDelta(0, arguments[at:at + size]) for at in range(0, len(arguments), size)]
        sent = b"".join(map(writer.write, [ToolCallStart(0, "patch", "call_1"), *pieces, ToolCallEnd(0)])).decode()
        deltas = [data["delta"] for kind, data in parsed(sent) if kind.endswith("input.delta")]
        assert "".join(deltas) == parsed(sent)[-1][1]["item"]["input"] == text
        assert len(deltas) >= min(len(text), 2) or size > 1 or not arguments.startswith('{"input": "')


def test_a_search_for_tools_is_left_to_the_client(serve):
    answer, fields = CASES["tool search"]
    item, = whole(serve(answer), **fields)["output"]
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "files"})


def test_usage_counts_reasoning_and_what_was_cached(serve):
    server = serve("abc</think>de")
    first, again = (whole(server, "Hi there " * 20)["usage"] for _ in range(2))
    assert first["output_tokens"] == len("abc") + 1 + len("de")
    assert first["output_tokens_details"] == {"reasoning_tokens": len("abc") + 1}
    assert first["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": first["input_tokens"]}
    assert again["input_tokens_details"]["cached_tokens"] == again["input_tokens"]
    assert first["total_tokens"] == first["input_tokens"] + first["output_tokens"]


def test_a_stream_tells_at_its_end_what_was_reused(serve):
    server = serve()
    for source in ("none", "memory-rewind"):
        told = stream(server, "Hi there " * 20, **OFF)[-1][1]["response"]["ds4mlx"]
        assert told["cache_source"] == source and told["cache"].startswith(source)


def test_a_response_repeats_what_it_was_asked_with(serve):
    fields = {"instructions": "Be kind.", "metadata": {"a": "b"}, "max_output_tokens": 50, "temperature": 0.5,
              "tools": FUNCTIONS, "parallel_tool_calls": False, "reasoning": {"effort": "low", "summary": "auto"}}
    answer = whole(serve("x</think>Hello."), **fields, model="mine")
    assert {key: answer[key] for key in fields} == fields and answer["model"] == "mine"
    assert answer["text"] == {"format": {"type": "text"}} and answer["id"].startswith("resp_")


def test_raw_reasoning_is_streamed_where_the_server_is_told_to(serve):
    server = serve("ab</think>c", settings={"raw_reasoning_events": True})
    events = stream(server)
    deltas = [data["delta"] for kind, data in events if kind == "response.reasoning_text.delta"]
    assert "".join(deltas) == "ab"
    assert events[-1][1]["response"]["output"][0]["content"] == [{"type": "reasoning_text", "text": "ab"}]


FORCED = {"required": ["bash", "patch"], **{kind: [name] for kind, name in (("function", "bash"), ("custom", "patch"))}}


@pytest.mark.parametrize("kind", FORCED)
def test_a_forced_call_comes_whatever_the_model_would_say(serve, kind):
    server = serve("Just text, and more of it. " * 20)
    choice = kind if kind == "required" else {"type": kind, "name": FORCED[kind][0]}
    item = whole(server, tools=[FUNCTIONS[0], PATCH], tool_choice=choice, max_output_tokens=300, **OFF)["output"][0]
    assert item["name"] in FORCED[kind] and item["call_id"].startswith("call_")
    assert item["type"] == {"bash": "function_call", "patch": "custom_tool_call"}[item["name"]]


def test_a_text_format_is_kept(serve):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    text = {"format": form}
    answer = whole(serve("Just text." * 20), text=text, max_output_tokens=200, **OFF)
    assert isinstance(json.loads(answer["output"][0]["content"][0]["text"])["ok"], bool)
    assert answer["text"] == text


# ---- the official client

TALKS = ["text", "reasoning", "tool", "parallel tools", "custom tool", "stop string"]


@pytest.mark.parametrize("name", TALKS)
def test_the_openai_client_reads_the_same_streamed_and_whole(serve, name):
    answer, fields = CASES[name]
    extra = {"stop": fields["stop"]} if "stop" in fields else {}
    fields = {key: value for key, value in fields.items() if key != "stop"}
    with openai.OpenAI(base_url=serve(answer).url + "/v1", api_key="none") as client:
        read = client.responses.create(model="any", input="Hi", extra_body=extra, **fields)
        with client.responses.stream(model="any", input="Hi", extra_body=extra, **fields) as events:
            streamed = events.get_final_response()
    parsed_too = re.sub(r', "parsed(_arguments)?": null', "", json.dumps(nameless(streamed.to_dict())["output"]))
    assert nameless(read.to_dict())["output"] == json.loads(parsed_too)
    assert read.output_text == streamed.output_text


def test_the_openai_client_goes_through_a_tool_turn(serve, tokenizer):
    texts = {False: THOUGHT + block(call("bash", command="ls")), True: "Now I know.</think>Two files."}
    server = serve(script=lambda prompt: tokenizer.encode_marked(texts["<tool_result>" in tokenizer.decode(prompt)]))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        talk = [{"role": "user", "content": "List"}]
        fields = {"model": "any", "tools": FUNCTIONS, "store": False, **SEALED}
        first = client.responses.create(input=talk, **fields)
        talk += [item.to_dict() for item in first.output]
        talk.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "a b"})
        second = client.responses.create(input=talk, **fields)
    assert second.output_text == "Two files."
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens + 1  # with the end of the turn
