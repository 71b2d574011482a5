"""What POST /v1/messages takes, what it makes of it, and what it refuses, in a shape of its own."""
import json
import re

import pytest

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Message, Reasoning, TextPart, ToolCall, ToolReference, ToolResult
from ds4mlx.config import Settings
from ds4mlx.engine.stub import Gate
from ds4mlx.errors import BadRequest
from ds4mlx.server.anthropic import read_asked
from ds4mlx.server.fields import Fields
from ds4mlx.server.sealed import seal
from ds4mlx.text.segments import rendered_text

USER = {"role": "user", "content": "Hi"}
BASH = {"name": "bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}


def asked(*messages, headers=None, **fields):
    return read_asked(Fields({"messages": list(messages) or [USER], **fields}), Settings(), headers=headers)


def conversation(*messages, **fields):
    return asked(*messages, **fields).turn.conversation


def prompt(*messages, **fields):
    return rendered_text(render(conversation(*messages, **fields), effort_profile="0731").segments)


def used(*ids):
    """An assistant message that calls bash under these ids."""
    return {"role": "assistant",
            "content": [{"type": "tool_use", "id": id, "name": "bash", "input": {"n": id}} for id in ids]}


def results(*ids, **more):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": f"<{id}>", **more}
                                        for id in ids]}


# ---- messages

def test_strings_and_text_blocks_give_the_same_prompt():
    def with_content(shape):
        return prompt({"role": "user", "content": shape("Hi")}, {"role": "system", "content": shape("Be brief.")},
                      {"role": "assistant", "content": shape("Yes?")}, {"role": "user", "content": shape("Go on")},
                      system=shape("You help."))
    assert with_content(str) == with_content(lambda text: [{"type": "text", "text": text}])


def test_markers_and_unknown_fields_leave_the_prompt_as_it_is():
    noise = {"cache_control": {"type": "ephemeral"}, "citations": None, "later_invention": 1}
    plain = [{"type": "text", "text": "Hi"}]
    assert prompt({"role": "user", "content": plain}, tools=[BASH]) == prompt(
        {"content": [plain[0] | noise], "role": "user", "id": "x"}, tools=[BASH | noise], metadata={"user_id": "u"},
        safeguards=[{}], context_management={"edits": []}, betas=["a"], service_tier="auto", container="c",
        mcp_servers=[], system=[], stream=True)


def test_system_blocks_stand_apart_and_the_billing_block_is_left_out():
    texts = ["x-anthropic-billing-header: cc_version=2.1.332.a1b; cc_entrypoint=cli;", "You are C.", "Be brief."]
    found = conversation(USER, system=[{"type": "text", "text": text} for text in texts])
    assert found.messages[0] == Message("system", (TextPart("You are C.\n\nBe brief."),))


def test_a_late_system_message_stays_in_its_place_even_as_the_last():
    late = {"role": "system", "content": "It is Monday."}
    assert prompt(USER, late).startswith(prompt(USER).partition("Hi")[0] + "Hi\n\nIt is Monday.")
    assert conversation(USER, late).continue_final is False


def test_calls_keep_their_ids_and_the_order_of_their_input():
    content = [{"type": "text", "text": "I look."},
               {"input": {"z": 1, "a": 5000.0}, "name": "bash", "id": "toolu_1", "type": "tool_use", "caller": None}]
    message = conversation(USER, {"role": "assistant", "content": content}, results("toolu_1")).messages[1]
    assert message.parts == (TextPart("I look."), ToolCall("toolu_1", "bash", '{"z": 1, "a": 5000.0}'))


def test_results_in_any_order_give_the_same_prompt():
    assert prompt(USER, used("a", "b"), results("a", "b")) == prompt(USER, used("a", "b"), results("b", "a"))


@pytest.mark.parametrize("content", ["text", [{"type": "text", "text": "text"}]])
def test_a_result_is_a_string_or_blocks_and_an_error_says_so_itself(content):
    message = conversation(USER, used("a"), results("a", content=content, is_error=True)).messages[2]
    assert prompt(USER, used("a"), results("a", content=content)) == prompt(
        USER, used("a"), results("a", content="text", is_error=True))
    assert message.parts[0].call_id == "a"


def test_a_result_without_content_is_empty():
    assert conversation(USER, used("a"), results("a", content=None)).messages[2].parts == (ToolResult("a", ""),)


def test_a_result_of_an_unknown_call_asks_for_the_whole_history():
    with pytest.raises(BadRequest, match=r"messages\[2\] has a result of call 'b'.*full messages history"):
        asked(USER, used("a"), results("b"))
    with pytest.raises(BadRequest, match=r"messages\[0\] has a result of call 'a'"):
        asked(results("a"))


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "container_upload"])
def test_blocks_that_cannot_be_shown_are_refused_by_their_name(kind):
    with pytest.raises(BadRequest, match=rf"messages\[0\].content\[1\] is of type '{kind}'"):
        asked({"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": kind, "source": {}}]})
    result = conversation(USER, used("a"), results("a", content=[{"type": "text", "text": "Here:"}, {"type": kind}]))
    assert result.messages[2].parts[0].content == ("Here:", f"[Unsupported {kind}]")


def test_an_assistant_message_at_the_end_is_gone_on_with():
    begun = {"role": "assistant", "content": "The answer is"}
    assert prompt(USER, begun).endswith("The answer is")


# ---- thinking that comes back

def test_a_signature_of_ours_brings_the_thinking_back():
    block = {"type": "thinking", "thinking": "", "signature": seal("a plan")}
    assert spoken(block) == (Reasoning("a plan"), TextPart("Yes"))


@pytest.mark.parametrize("signature", ["", None, "EqQBCkYIARgCKkA", "ours, with another end", 7])
def test_a_signature_that_is_not_ours_means_nothing(signature):
    if signature == "ours, with another end":   # not above: its name would differ from process to process, as keys do
        signature = seal("other")[:-1] + "!"
    assert spoken({"type": "thinking", "thinking": "a plan", "signature": signature})[0] == Reasoning("a plan")


def test_redacted_thinking_is_ours_or_nothing():
    assert spoken({"type": "redacted_thinking", "data": seal("a plan")})[0] == Reasoning("a plan")
    assert spoken({"type": "redacted_thinking", "data": "EmwKAhgB"}) == (TextPart("Yes"),)


def spoken(block):
    content = [block, {"type": "text", "text": "Yes"}]
    return conversation(USER, {"role": "assistant", "content": content}, USER).messages[1].parts


# ---- tools

def test_a_schema_is_shown_under_parameters_in_the_order_received():
    (tool,) = conversation(tools=[{"input_schema": BASH["input_schema"], "strict": True, "name": "bash",
                                   "description": "Runs.", "type": "custom"}]).tools
    assert json.dumps(tool.schema) == json.dumps(
        {"name": "bash", "description": "Runs.", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}})


def test_tools_that_others_run_are_skipped_unless_they_have_a_schema():
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    assert conversation(tools=[hosted, BASH]).tools == conversation(tools=[BASH]).tools
    assert [tool.name for tool in conversation(tools=[hosted | {"input_schema": {}}]).tools] == ["web_search"]


def test_a_deferred_tool_is_defined_where_it_is_referred_to():
    late = {"name": "late", "input_schema": {}, "defer_loading": True}
    found = results("a", content=[{"type": "tool_reference", "tool_name": "late"}])
    before, after = prompt(USER, used("a"), found, tools=[late, BASH]).split("<tool_result>")
    assert before == prompt(USER, used("a"), found, tools=[BASH]).partition("<tool_result>")[0]
    assert '"name": "late"' in after
    assert conversation(USER, used("a"), found, tools=[late]).messages[2].parts == (
        ToolResult("a", (ToolReference("late"),)),)


@pytest.mark.parametrize("tools, error", [
    ([BASH, BASH], "'bash' 2 times"), ([{"name": "x"}], r"tools\[0\].input_schema"), ([{"input_schema": {}}], "name"),
    ([7], r"tools\[0\] is an integer"), ({}, "tools is an object")])
def test_tools_that_mean_nothing_are_refused(tools, error):
    with pytest.raises(BadRequest, match=error):
        asked(tools=tools)


@pytest.mark.parametrize("choice, banned, must_call, one_call", [
    (None, False, (), False), ({"type": "auto"}, False, (), False), ({"type": "none"}, True, (), False),
    ({"type": "auto", "disable_parallel_tool_use": True}, False, (), True),
    ({"type": "any"}, False, ("bash", "read"), False), ({"type": "tool", "name": "read"}, False, ("read",), False)])
def test_tool_choice_forbids_calls_or_asks_for_them(choice, banned, must_call, one_call):
    turn = asked(tools=[BASH, BASH | {"name": "read"}], tool_choice=choice).turn
    found = turn.conversation
    assert (found.tools_banned, found.must_call, turn.one_call) == (banned, must_call, one_call)
    assert len(found.tools) == 2


# ---- thinking and limits that are asked for

@pytest.mark.parametrize("fields, thinking, effort", [
    ({}, True, None), ({"thinking": {"type": "disabled"}}, False, None),
    ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, True, None),
    ({"thinking": {"type": "adaptive", "display": "updates"}, "output_config": {"effort": "xhigh"}}, True, "high"),
    ({"output_config": {"effort": "max"}}, True, "max"),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False, "high"),
    ({"model": "deepseek-chat"}, False, None)])
def test_thinking_is_switched_and_told_its_effort(fields, thinking, effort):
    found = conversation(**fields)
    assert (found.thinking, found.effort) == (thinking, effort)


def test_limits_stops_and_hints_are_read():
    turn = asked(max_tokens=7, stop_sequences=["a", "", "b"], metadata={"user_id": "u"},
                 headers={"x-claude-code-session-id": "s", "x-claude-code-agent-id": "g"}).turn
    assert (turn.max_tokens, turn.stop, turn.api, turn.conversation.ids) == (7, ("a", "b"), "anthropic", ("s/g", "u"))
    assert asked().turn.max_tokens is None


def test_a_format_is_asked_for_in_the_prompt():
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    found = conversation(output_config={"format": wanted})
    assert found.response_format == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize("fields, error", [
    ({"messages": []}, "messages"), ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\].content"), ({"messages": ["Hi"]}, r"messages\[0\]"),
    ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, r"content\[0\].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, "'tool_use', need one of text"),
    ({"max_tokens": 0}, "max_tokens"), ({"temperature": 3}, "temperature"), ({"stop_sequences": [1]}, "stop_sequences"),
    ({"system": 7}, "system"), ({"system": [{"type": "image"}]}, "'image'"), ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "effort"), ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "'x', which is not among"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "results"),
])
def test_what_cannot_be_meant_is_a_400_in_anthropics_shape(server, fields, error):
    answer = server.post("/v1/messages", json={"messages": [USER], **fields})
    content = answer.json()
    assert answer.status_code == 400 and content["type"] == "error", content
    assert content["error"]["type"] == "invalid_request_error" and re.search(error, content["error"]["message"])
    assert content["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


# ---- errors of the server

def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(server):
    answer = server.post("/v1/messages", json={"messages": [{"role": "user", "content": "x" * 5000}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == f"prompt is too long: {error['n_prompt_tokens']} tokens > 4096 maximum"


def test_a_wrong_method_and_a_broken_body_have_anthropics_shape(server):
    wrong = server.client.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"], wrong.headers["allow"]) == (405, "error", "POST")
    broken = server.post("/v1/messages", content=b"{")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_key_is_taken_from_either_header(serve):
    server = serve(settings={"api_key": "sesame"})
    for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
        assert server.post("/v1/messages", json={"messages": [USER]}, headers=headers).status_code == 200
    refused = server.post("/v1/messages", json={"messages": [USER]}, headers={"x-api-key": "other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_an_unknown_model_of_a_strict_server_is_not_found(serve):
    refused = serve(settings={"strict_model": True}).post("/v1/messages", json={"messages": [USER], "model": "other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


def test_any_query_and_any_beta_is_taken(server):
    answer = server.post("/v1/messages?beta=true", json={"messages": [USER]},
                         headers={"anthropic-version": "2099-01-01", "anthropic-beta": "a-2025,b-2026"})
    assert answer.status_code == 200 and answer.headers["request-id"].startswith("req_")


# ---- counting

def test_counting_agrees_with_the_prompt_of_the_answer(server):
    body = {"messages": [USER], "tools": [BASH], "system": "You help.", "tool_choice": {"type": "any"}}
    counted = server.post("/v1/messages/count_tokens?beta=true", json=body).json()
    usage = server.post("/v1/messages", json=body | {"tool_choice": None}).json()["usage"]
    assert counted == {"input_tokens": sum(value for key, value in usage.items() if "input" in key)}


def test_counting_does_not_wait_for_the_engine(serve):
    server, gate = serve(), Gate()
    server.stub.before_prefill = gate
    with server.client.stream("POST", "/v1/messages", json={"messages": [USER], "stream": True}) as answer:
        assert gate.reached.wait(60)
        assert server.post("/v1/messages/count_tokens", json={"messages": [USER]}).json() == {"input_tokens": 6}
        gate.opened.set()
        answer.read()


# ---- usage

@pytest.mark.parametrize("usage, computed", [("split", "cache_creation_input_tokens"), ("flat", "input_tokens")])
def test_computed_tokens_are_told_as_written_or_as_input(serve, usage, computed):
    server = serve(settings={"anthropic_usage": usage})
    question = {"messages": [{"role": "user", "content": "x" * 100}]}
    first, again = (server.post("/v1/messages", json=question).json()["usage"] for _ in range(2))
    assert {key: value for key, value in first.items() if value} == {computed: 104, "output_tokens": len("Hello.")}
    assert {key for key, value in again.items() if value} == {"cache_read_input_tokens", "output_tokens"}
