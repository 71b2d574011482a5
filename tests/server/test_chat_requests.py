"""What a request may say: each field is read, refused by name, or ignored, and bad bytes cost one clear answer."""
import asyncio
import dataclasses
import gzip
import json
import re
import socket
import threading
import zlib

import pytest
from starlette.requests import Request

from ds4mlx.chat.messages import Reasoning, TextPart, ToolCall, ToolResult
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server.body import INLINE_BYTES, read_body
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}, "strict": True}}


def read(settings=Settings(), **fields):
    return read_chat(Fields({"messages": [USER], **fields}), settings)


def error(server, **kwargs):
    """Status and error object of a refused request."""
    answer = server.post(**kwargs)
    assert answer.headers["content-type"] == "application/json" and answer.text.endswith("\n")
    return answer.status_code, answer.json()["error"]


# field -> a value it cannot have
WRONG = {
    "messages": [None, [], "Hi", {}, [1], [{}], [{"role": "king", "content": "Hi"}], [{"role": "user", "content": 5}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                 [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["Hi"]}],
                 [{"role": "assistant", "tool_calls": [{"id": "a"}]}], [{"role": "assistant", "tool_calls": {}}],
                 [{"role": "system", "content": "x"}], [USER, {"role": "assistant", "content": "x"}]],
    "model": [5], "stream": ["yes", 1], "stream_options": [5, {"include_usage": "yes"}],
    "max_tokens": [-1, 1.5, "5", True], "max_completion_tokens": ["many"],
    "temperature": [-0.1, 2.1, "hot", True], "top_p": [1.1], "min_p": [-1], "top_k": [-2, 0.5], "seed": ["x", 0.5],
    "presence_penalty": [3], "frequency_penalty": [-3], "repetition_penalty": [0], "n": [2, 0],
    "logit_bias": [[], {"x": 1}, {"5": 101}, {"5": "a"}, {"99999999": 1}, {"9" * 5000: 1}],
    "stop": [5, ["a"] * 65, ["x" * 1025], [1]], "logprobs": [1], "top_logprobs": [21, 1],
    "tools": [{}, [5], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}], [TOOL, TOOL],
              [{"type": "function", "function": {"name": "ls", "parameters": "none"}}]],
    "tool_choice": ["maybe", 5, "required", {"type": "function", "function": {"name": "rm"}}],
    "response_format": ["json", {}, {"type": "xml"}, {"type": "json_schema"}],
    "reasoning_effort": ["extreme", True, 0], "thinking": ["yes", {"type": "maybe"}], "think": ["yes"],
    "enable_thinking": [1], "chat_template_kwargs": [5, {"thinking": "x"}], "reasoning": [5, {"effort": []}],
    "continue_final_message": ["x"], "audio": [{}], "prediction": [{}], "web_search_options": [{}],
    "modalities": [["audio"]],
}


@pytest.mark.parametrize("field, value", [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_is_a_400_that_names_its_field(server, field, value):
    status, fault = error(server, json={"messages": [USER], field: value})
    assert (status, fault["type"]) == (400, "invalid_request_error")
    assert field in fault["message"] or field in (fault["param"] or "")


@pytest.mark.parametrize("body, told", [
    (b"", "not JSON"), (b"{", "not JSON"), (b"[]", "must be a JSON object"), (b"\xff{}", "not UTF-8"),
    (b'{"temperature": NaN}', "NaN"), (b'{"temperature": Infinity}', "Infinity"), (b'{"temperature": 1e999}', "1e999"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "thousands of digits"), (b'"' + b"[" * 300 + b'"', "must be a JSON object"),
    (b'{"a":' * 257 + b"1" + b"}" * 257, "nested deeper than 256"),
    (b'{"a":' + b"[" * 256 + b"]" * 256 + b"}", "nested deeper than 256"),
    (b"[" * 100_000, "nested deeper"), (b'{"a":"' + b"\x00" + b'"}', "not JSON")])
def test_bytes_that_are_no_request_get_one_clear_error(server, body, told):
    status, fault = error(server, content=body)
    assert status == 400 and told in fault["message"]


def test_nesting_up_to_the_limit_is_read(server):
    body = b'{"messages":[{"role":"user","content":"Hi"}],"x":' + b"[" * 255 + b"]" * 255 + b"}"
    assert server.post(content=body).status_code == 200


def test_a_large_body_is_read_off_the_event_loop():
    def thread_of(size):
        async def receive():
            return {"type": "http.request", "body": json.dumps({"x": "a" * size}).encode()}
        request = Request({"type": "http", "headers": []}, receive)
        return asyncio.run(read_body(request, 1 << 20, lambda body: threading.get_ident()))
    assert thread_of(10) == threading.get_ident() != thread_of(INLINE_BYTES)


def test_a_bom_duplicate_keys_and_unknown_fields_are_no_reason_to_refuse(server):
    body = b'\xef\xbb\xbf{"max_tokens":0,"max_tokens":2,"zzz":[{}],"messages":[{"role":"user","content":"Hi","x":1}]}'
    assert server.post(content=body).json()["usage"]["completion_tokens"] == 2


def test_lone_surrogates_become_replacement_characters():
    body = Fields(json.loads(r'{"messages":[{"role":"user","content":"a\ud800b"}]}'))
    assert read_chat(body, Settings()).turn.conversation.messages[0].parts == (TextPart("a\ufffdb"),)


@pytest.mark.parametrize("encoding, pack", [("gzip", gzip.compress), ("deflate", zlib.compress),
                                            ("deflate", lambda raw: zlib.compress(raw, wbits=-15))])
def test_compressed_bodies_are_read(server, encoding, pack):
    body = pack(json.dumps({"messages": [USER]}).encode())
    assert server.post(content=body, headers={"content-encoding": encoding}).status_code == 200


@pytest.mark.parametrize("encoding, body, status", [
    ("br", b"x", 415), ("gzip", b"x", 400), ("gzip", gzip.compress(b"{}", mtime=0)[:-9], 400), ("deflate", b"", 400),
    ("gzip", gzip.compress(b" " * (3 << 20), mtime=0), 413)])
def test_bad_or_swollen_compression_is_refused(serve, encoding, body, status):
    server = serve(settings={"max_body_mb": 1})
    assert error(server, content=body, headers={"content-encoding": encoding})[0] == status


def test_a_body_over_the_limit_is_a_413_with_its_length_declared_or_not(serve):
    server = serve(settings={"max_body_mb": 1})
    large = json.dumps({"messages": [{"role": "user", "content": "x" * (2 << 20)}]}).encode()
    assert error(server, content=large)[0] == 413
    pieces = (large[start:start + 65536] for start in range(0, len(large), 65536))
    status, fault = error(server, content=pieces)  # an iterator is sent in chunks, without Content-Length
    assert (status, fault["code"]) == (413, "request_too_large")
    assert server.chat()["choices"]


def test_a_prompt_far_too_long_is_refused_by_its_beginning(serve):
    server = serve(settings={"ctx": 64})
    status, fault = error(server, json={"messages": [{"role": "user", "content": "x" * 1_000_000}]})
    assert (status, fault["code"]) == (400, "context_length_exceeded")
    assert 128 < fault["n_prompt_tokens"] < 100_000 and "prompt is at least" in fault["message"]


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(serve):
    status, fault = error(serve(settings={"ctx": 64}), json={"messages": [{"role": "user", "content": "x" * 60}]})
    assert (status, fault["code"], fault["param"]) == (400, "context_length_exceeded", "messages")
    assert (fault["n_prompt_tokens"], fault["n_ctx"]) == (64, 64)
    assert "prompt is 64 tokens, context size is 64 tokens" in fault["message"]
    assert "maximum context length is 64 tokens" in fault["message"]


def test_errors_known_beforehand_are_no_stream(server):
    assert error(server, json={"messages": [USER], "stream": True, "logit_bias": {"99999": 1}})[0] == 400


def test_a_request_cut_off_in_its_body_leaves_the_server_well(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    assert server.chat()["choices"]


# ---- reading

def test_messages_of_every_role_become_parts():
    messages = [
        {"role": "developer", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "a"},
                                                                            {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "out"}]
    parts = [(message.role, message.parts) for message in read(messages=messages).turn.conversation.messages]
    assert parts == [("system", (TextPart("S"),)), ("user", (TextPart("ab"),)),
                     ("assistant", (Reasoning("R"), ToolCall("1", "ls", '{"a": 1}'))),
                     ("tool", (ToolResult("1", "out"),))]


@pytest.mark.parametrize("fields, parts", [
    ({"reasoning_content": "R", "reasoning": "other"}, (Reasoning("R"),)), ({"reasoning": "R"}, (Reasoning("R"),)),
    ({"reasoning_content": " ", "reasoning": "R"}, (Reasoning("R"),)), ({"reasoning_content": " \n"}, ())])
def test_reasoning_is_the_first_that_is_not_blank(fields, parts):
    answer = {"role": "assistant", "content": None, **fields}
    assert read(messages=[USER, answer, USER]).turn.conversation.messages[1].parts == parts


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_an_assistant_message_needs_no_content(content):
    message = {"role": "assistant", "reasoning_content": "", "function_call": {"name": "ls", "arguments": ""}}
    assert read(messages=[USER, message | content]).turn.conversation.messages[1].parts == (ToolCall("", "ls", "{}"),)


def test_a_tool_keeps_its_schema_as_received_but_for_strict():
    tool, = read(tools=[TOOL]).turn.conversation.tools
    assert tool.schema == {"name": "ls", "parameters": {"type": "object"}}
    assert read(functions=[TOOL["function"]]).turn.conversation.tools == (tool,)


def test_numbers_reach_the_prompt_as_they_were_spelled(serve, tokenizer):
    """In schemas, formats and arguments sent as an object; and fields spelled so oddly are the numbers they are."""
    prompts = []
    server = serve(script=lambda prompt: prompts.append(list(prompt)) or [tokenizer.eos])
    odd = '{"a": 1e3, "b": 1.0, "c": -1.50E+2, "d": 12345678901234567890, "e": 0.10000000000000000555}'
    call = f'{{"role": "assistant", "tool_calls": [{{"id": "1", "function": {{"name": "ls", "arguments": {odd}}}}}]}}'
    result = '{"role": "tool", "content": "", "tool_call_id": "1"}'
    body = (f'{{"messages": [{{"role": "user", "content": "Hi"}}, {call}, {result}], '
            f'"tools": [{{"type": "function", "function": {{"name": "ls", "parameters": {odd}}}}}], '
            f'"response_format": {{"type": "json_schema", "json_schema": {odd}}}, "temperature": 1e0, "top_k": 5.0, '
            '"seed": 1e2, "reasoning_effort": 5e1, "max_tokens": 1.0e0}')
    answer, prompt = server.post(content=body), tokenizer.decode(prompts[-1])
    assert answer.status_code == 200 and prompt.count(odd) == 2
    assert re.findall('string="false">(.*?)<', prompt) == re.findall(r': (.*?)[,}]', odd)


def test_hosted_tools_without_a_function_are_skipped():
    assert read(tools=[{"type": "web_search"}, TOOL]).turn.conversation.tools[0].name == "ls"


@pytest.mark.parametrize("fields, thinking, effort", [
    ({}, True, None), ({"thinking": False}, False, None), ({"thinking": {"type": "disabled"}}, False, None),
    ({"think": True, "reasoning_effort": "none"}, False, None), ({"reasoning_effort": "max"}, True, "max"),
    ({"reasoning_effort": 95}, True, "max"), ({"reasoning": {"effort": "medium"}}, True, "low"),
    ({"model": "deepseek-chat"}, False, None), ({"model": "deepseek-chat", "think_level": "high"}, True, "high"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False, None), ({"thinking": None}, True, None),
    ({"enable_thinking": False, "reasoning_effort": "high"}, False, "high")])
def test_thinking_is_decided_by_the_strictest_word_of_the_request(fields, thinking, effort):
    conversation = read(**fields).turn.conversation
    assert (conversation.thinking, conversation.effort) == (thinking, effort)


def test_without_a_word_the_model_alias_decides_before_the_server():
    quiet = Settings(default_thinking=False)
    assert not read(quiet).turn.conversation.thinking
    assert read(quiet, model="deepseek-reasoner").turn.conversation.thinking


def test_the_servers_sampling_fills_in_only_what_is_absent():
    sampling = read(Settings(temp=0.3, top_k=7), temperature=0, top_k=None, min_p=0.5).turn.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0, 7, 0.5)


@pytest.mark.parametrize("asked, taken", [(-1, 0), (0, 0), (5, 5), (1 << 24, 1 << 24), (1 << 40, 1 << 24)])
def test_any_number_of_tokens_may_be_left_to_choose_from(asked, taken):
    assert read(top_k=asked).turn.sampling.top_k == taken


def test_seeds_wrap_and_absent_ones_differ():
    assert read(seed=-1).turn.sampling.seed == 2**64 - 1 and read(seed=0).turn.sampling.seed == 0
    assert read().turn.sampling.seed != read().turn.sampling.seed  # equal with chance 2**-64


def test_the_later_name_of_the_token_limit_wins():
    assert read(max_tokens=5, max_completion_tokens=7).turn.max_tokens == 7
    assert read(max_tokens=5).turn.max_tokens == 5


def test_stop_strings_come_alone_or_in_a_list_without_empty_ones():
    assert read(stop="a").turn.stop == ("a",) and read(stop=["a", "", "b", "a"]).turn.stop == ("a", "b")


def test_a_response_format_of_text_asks_for_nothing():
    assert read(response_format={"type": "text"}).turn.conversation.response_format is None
    assert read(response_format={"type": "json_object"}).turn.conversation.response_format == {"type": "json_object"}


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "ls"}},
                                    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}])
def test_a_forced_call_names_the_tools_that_it_may_be_of(choice):
    assert read(tools=[TOOL], tool_choice=choice).turn.conversation.must_call == ("ls",)


def test_a_call_cannot_be_forced_of_tools_that_are_not_there():
    with pytest.raises(BadRequest, match="tool_choice asks for a call, and there are no tools"):
        read(tool_choice="required")
    with pytest.raises(BadRequest, match="names 'rm', which is not among the tools"):
        read(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "rm"}})


def test_a_strict_tool_is_read_as_one_and_the_word_is_not_shown_to_the_model():
    tool, = read(tools=[{"type": "function", "function": {"name": "ls", "strict": True}}]).turn.conversation.tools
    assert tool.strict and tool.schema == {"name": "ls"}


def test_allowed_tools_in_auto_mode_is_auto():
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "ls"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert not read(tools=[TOOL], tool_choice=choice).turn.conversation.tools_banned


def test_any_model_name_is_echoed_unless_the_server_is_strict(serve):
    server = serve(settings={"strict_model": True, "served_model_name": ("mine",)})
    assert server.chat(model="mine")["model"] == "mine"
    status, fault = error(server, json={"messages": [USER], "model": "claude"})
    assert (status, fault["code"]) == (404, "model_not_found")
    assert read(dataclasses.replace(Settings()), model="claude").model == "claude"


def test_an_effort_that_the_context_has_no_room_for_is_lowered_and_reported(serve):
    server, request = serve(effort_profile="preview"), {"messages": [USER], "reasoning_effort": "max"}
    assert server.post(json=request).headers["x-ds4mlx-effort"] == "high"
    with server.client.stream("POST", "/v1/chat/completions", json=request | {"stream": True}) as answer:
        assert answer.headers["x-ds4mlx-effort"] == "high" and answer.read()
    assert "x-ds4mlx-effort" not in server.post(json=request | {"reasoning_effort": "high"}).headers


def test_each_api_has_the_default_effort_that_the_server_gives_it(serve):
    server = serve(effort_profile="preview", settings={"default_effort": ("low", "messages=max")})
    lowered = [server.post(path, json={"messages": [USER]}).headers.get("x-ds4mlx-effort")   # where max has no room
               for path in ("/v1/chat/completions", "/v1/messages")]
    assert lowered == [None, "high"]
