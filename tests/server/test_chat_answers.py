"""What a client of POST /v1/chat/completions receives: the order of a stream, and the same answer whole."""
import json

import openai
import pytest

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
         for name in ("bash", "read")]


def call(name, **arguments):
    parameters = "".join(f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                         f'{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n'
                         for key, value in arguments.items())
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def block(*calls):
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(calls) + "</｜DSML｜tool_calls>"


# name -> (the model's text, fields of the request)
CASES = {
    "text": ("Hello, 世界.", {}),
    "reasoning": ("Let me see.</think>Done.", {"thinking": True}),
    "unclosed reasoning": ("Hm", {"thinking": True}),
    "call": ("I look." + block(call("bash", command='echo "ä" <b>\n', timeout=5)), {"tools": TOOLS}),
    "two calls": (block(call("bash", command="ls"), call("read", path="a")), {"tools": TOOLS}),
    "reasoning and call": ("plan</think>" + block(call("bash")), {"tools": TOOLS, "thinking": True}),
    "length": ("Hello", {"max_tokens": 3}),
    "stop string": ("one STOP two", {"stop": ["STOP", "never"]}),
    "empty": ("", {}),
}


def assembled(events):
    """The message, finish reason and usage that the chunks of a stream add up to."""
    message, finish, usage = {"role": None, "content": ""}, None, None
    for chunk in events[:-1]:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    calls = message.setdefault("tool_calls", [])
                    for part in value:
                        if part["index"] == len(calls):
                            calls.append({"id": part["id"], "type": part["type"],
                                          "function": {"name": part["function"]["name"], "arguments": ""}})
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
                else:
                    message[key] = (message.get(key) or "") + value
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return message, finish, usage


@pytest.mark.parametrize("name", CASES)
def test_a_stream_adds_up_to_the_whole_answer(serve, name):
    answer, fields = CASES[name]
    server = serve(answer)
    message, finish, usage = assembled(server.events(stream_options={"include_usage": True}, **fields))
    whole = server.chat(**fields)
    for tool_call in [*message.get("tool_calls", ()), *whole["choices"][0]["message"].get("tool_calls", ())]:
        assert tool_call.pop("id").startswith("call_")
    assert message == whole["choices"][0]["message"]
    assert finish == whole["choices"][0]["finish_reason"]
    counted = ("prompt_tokens", "completion_tokens", "completion_tokens_details")
    assert [usage[key] for key in counted] == [whole["usage"][key] for key in counted]


@pytest.mark.parametrize("name, finish", [("text", "stop"), ("length", "length"), ("stop string", "stop"),
                                          ("call", "tool_calls"), ("two calls", "tool_calls"), ("empty", "stop")])
def test_every_stream_ends_with_its_finish_reason_and_done(serve, name, finish):
    answer, fields = CASES[name]
    events = serve(answer).events(**fields)
    assert events[-1] == "[DONE]" and events[-2]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])


def test_a_stream_opens_with_the_role_then_reasoning_then_text(serve):
    events = serve("Let me see.</think>Done.").events(thinking=True)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    order = [next(iter(delta)) for delta in deltas[1:-1]]
    assert order == sorted(order, reverse=True) and set(order) == {"reasoning_content", "content"}


def test_the_usage_chunk_comes_last_and_only_when_asked_for(server):
    asked = server.events(stream_options={"include_usage": True})
    assert asked[-2]["choices"] == [] and asked[-2]["usage"]["completion_tokens"] == len("Hello.")
    assert all(event["usage"] is None for event in asked[:-2])
    assert all("usage" not in event for event in server.events()[:-1])


def test_calls_carry_the_arguments_as_json_and_ids_that_differ(serve):
    message = serve(CASES["two calls"][0]).chat(tools=TOOLS)["choices"][0]["message"]
    first, second = message["tool_calls"]
    assert message["content"] is None
    assert (first["function"]["name"], json.loads(first["function"]["arguments"])) == ("bash", {"command": "ls"})
    assert (second["function"]["name"], json.loads(second["function"]["arguments"])) == ("read", {"path": "a"})
    assert len({first["id"], second["id"]}) == 2 and all(len(c["id"]) == len("call_") + 32 for c in (first, second))


def test_one_call_is_enough_when_parallel_calls_are_off(serve):
    answer = serve(CASES["two calls"][0]).chat(tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["bash"]
    assert answer["finish_reason"] == "tool_calls"


def test_with_tool_choice_none_the_block_marker_is_never_sampled(serve):
    answer = serve(CASES["call"][0]).chat(tools=TOOLS, tool_choice="none", max_tokens=40)["choices"][0]
    assert "tool_calls" not in answer["message"] and "｜DSML｜" not in answer["message"]["content"]


def test_the_answer_cannot_end_inside_a_tool_block(serve, tokenizer):
    head, tail = block(call("bash", command="pwd")).split("pwd")
    ids = [*tokenizer.encode_marked(head + "pwd"), tokenizer.eos, *tokenizer.encode_marked(tail)]
    choice = serve(script=lambda prompt: ids).chat(tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"  # another token took the place of EOS
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["command"].startswith("pwd")


def test_a_model_that_insists_on_ending_inside_a_block_may(serve):
    answer = serve(block(call("bash", command="pwd")).split("pwd")[0]).chat(tools=TOOLS, max_tokens=500)
    assert answer["error"]["code"] == "incomplete_tool_call"


def test_nothing_after_a_stop_string_is_shown(serve):
    choice = serve("one STOP two").chat(stop="STOP")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")


def test_reasoning_is_counted_and_the_last_eos_is_not(serve):
    usage = serve("abc</think>de").chat(thinking=True)["usage"]
    assert usage["completion_tokens"] == len("abc") + 1 + len("de")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("abc") + 1  # with </think>


def test_a_next_turn_without_the_reasoning_goes_on_from_the_end_of_the_answer(serve):
    server = serve("plan</think>Done.")
    history = [{"role": "user", "content": "Hi"}]
    first = server.post(json={"messages": history}).json()["usage"]
    history += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "More"}]
    second = server.post(json={"messages": history}).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] == first["total_tokens"] + 1  # with the end of the answer


def test_a_repeated_prompt_is_reported_as_cached(serve):
    server = serve()
    first, again = (server.chat("a long question " * 50)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"] == {"cached_tokens": again["prompt_tokens"], "cache_write_tokens": 0}


def test_an_answer_never_passes_the_context(serve):
    server = serve("x" * 500, settings={"ctx": 64})
    answer = server.chat(max_tokens=10_000)
    assert answer["usage"]["total_tokens"] == 64 and answer["choices"][0]["finish_reason"] == "length"


def test_a_limit_of_no_tokens_gives_an_empty_answer(server):
    choice = server.chat(max_tokens=0)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_equal_seeds_give_equal_answers(serve):
    server = serve(script=lambda prompt: [None] * 20)
    answers = [server.chat(seed=seed, min_p=0, max_tokens=20)["choices"][0]["message"] for seed in (0, 0, 1)]
    assert answers[0] == answers[1] != answers[2]


def test_logprobs_cover_the_visible_tokens_only(serve):
    server = serve("ab</think>cd" + block(call("bash")))
    choice = server.chat(thinking=True, tools=TOOLS, logprobs=True, top_logprobs=2)["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert [token["token"] for token in tokens] == ["c", "d"] and tokens[0]["bytes"] == [ord("c")]
    assert all(len(token["top_logprobs"]) == 2 and token["top_logprobs"][0]["token"] == token["token"]
               for token in tokens)


def test_streamed_logprobs_equal_those_of_the_whole_answer(server):
    fields = {"logprobs": True, "top_logprobs": 1}
    streamed = [token for event in server.events(**fields)[:-1]
                for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == server.chat(**fields)["choices"][0]["logprobs"]["content"] and len(streamed) == len("Hello.")


def test_a_failure_before_the_first_token_is_a_500_when_nothing_was_sent(serve):
    server = serve()
    server.stub.before_decode = _fail
    answer = server.post(json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    server.stub.before_decode = None
    assert server.chat()["choices"][0]["message"]["content"] == "Hello."


def test_a_failure_within_a_stream_is_an_error_event_then_done(serve):
    steps = iter(range(100))
    server = serve()
    server.stub.before_decode = lambda: _fail() if next(steps) == 3 else None
    events = server.events()
    assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"
    assert assembled([e for e in events if "choices" in e] + ["[DONE]"])[0]["content"] == "Hel"


def _fail():
    raise ArithmeticError("logits are not finite")


def test_the_openai_client_reads_whole_answers(serve):
    server = serve("plan</think>I look." + block(call("bash", command="ls")))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)
        assert [model.id for model in client.models.list()] == ["deepseek-v4-flash"]
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("I look.", "plan")
    assert message.tool_calls[0].function.name == "bash" and answer.usage.prompt_tokens > 0


def test_the_openai_client_streams(serve):
    server = serve("plan</think>Done.")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        with client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], stream=True,
                                            stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Done." and chunks[-1].usage.completion_tokens == len("plan") + 1 + len("Done.")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_the_openai_client_sees_errors_inside_a_stream(serve):
    server = serve()
    server.stub.before_decode = _fail
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="the engine failed"):
            with client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}],
                                                stream=True) as stream:
                list(stream)
