"""What POST /v1/responses accepts: items that become the conversation that chat requests would have said."""
import json

import pytest

from ds4mlx.chat.messages import Message, Reasoning, TextPart, ToolCall, ToolReference, ToolResult
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_responses import read_request
from ds4mlx.server.responses_store import ResponseStore
from ds4mlx.server.sealed import seal

SPACE = {"type": "namespace", "name": "mcp__files__", "tools": [
    {"type": "function", "name": "list", "description": "Lists.", "parameters": {"type": "object"}, "strict": False}]}
BASH = {"type": "function", "name": "bash", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "bash", "arguments": '{"a": 1}',
        "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}


def read(items, **fields):
    return read_request(Fields({"input": items, **fields}), Settings(), ResponseStore(4))


def said(*items, **fields):
    """The messages of a request of these items and one question before them."""
    return read([USER, *items], **fields).turn.conversation.messages[1:]


def thought(text="hm", **members):
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}], **members}


def spoke(text="Yes."):
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def test_a_string_is_one_user_message():
    assert read("Hi").turn.conversation.messages == (Message("user", (TextPart("Hi"),)),)


def test_instructions_and_developer_items_lead():
    parts = [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]
    items = [{"role": "developer", "content": parts},
             {"type": "message", "role": "user", "content": "Hi", "id": "client_made"}]
    assert read(items, instructions="First.").turn.conversation.messages == (
        Message("system", (TextPart("First."),)), Message("system", (TextPart("AB"),)),
        Message("user", (TextPart("Hi"),)))


def test_reasoning_text_and_calls_of_one_turn_become_one_message():
    second = CALL | {"call_id": "c2"}
    assert said(thought(), spoke(), CALL, second, RESULT) == (
        Message("assistant", (Reasoning("hm"), TextPart("Yes."), ToolCall("c1", "bash", '{"a": 1}'),
                              ToolCall("c2", "bash", '{"a": 1}'))),
        Message("tool", (ToolResult("c1", "done"),)))


def test_reasoning_without_an_answer_is_a_turn_of_its_own():
    assert said(thought(), USER) == (Message("assistant", (Reasoning("hm"),)), Message("user", (TextPart("Hi"),)))


def test_new_reasoning_begins_a_new_turn():
    assert [message.role for message in said(thought(), spoke(), thought(), CALL, RESULT)] == [
        "assistant", "assistant", "tool"]


def test_sealed_reasoning_counts_before_a_summary_before_plain_text():
    raw = {"content": [{"type": "reasoning_text", "text": "raw"}]}
    forms = [thought("summary", encrypted_content=seal("sealed"), **raw),
             thought("summary", encrypted_content="gAAAA-of-another-server", **raw),
             {"type": "reasoning", "summary": [], **raw}]
    assert [said(form, spoke(), USER)[0].parts[0].text for form in forms] == ["sealed", "summary", "raw"]


def test_reasoning_of_nothing_says_nothing():
    assert said({"type": "reasoning", "summary": []}, spoke(), USER)[0].parts == (TextPart("Yes."),)


def test_a_custom_call_is_a_call_of_one_string():
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": '+"a"\n'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]}
    first, second = said(call, result)
    assert first.parts == (ToolCall("c1", "patch", '{"input": "+\\"a\\"\\n"}'),)
    assert second.parts == (ToolResult("c1", "ok"),)


@pytest.mark.parametrize("item, call", [
    ({"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}},
     ToolCall("c1", "local_shell", '{"command": ["ls"]}')),
    ({"type": "web_search_call", "id": "ws_1", "action": {"query": "x"}},
     ToolCall("ws_1", "web_search", '{"query": "x"}')),
    ({"type": "mcp_call", "id": "m1", "name": "find", "arguments": '{"x":1}'}, ToolCall("m1", "find", '{"x":1}'))])
def test_hosted_calls_are_calls_of_their_tool(item, call):
    assert said(item, USER)[0].parts == (call,)


def test_results_that_are_neither_text_nor_parts_are_dumped():
    result = RESULT | {"output": {"exit": 0, "lines": ["a"]}}
    assert said(CALL, result)[1].parts == (ToolResult("c1", '{"exit": 0, "lines": ["a"]}'),)


def test_results_may_come_in_any_order():
    second = [CALL | {"call_id": "c2"}, RESULT | {"call_id": "c2"}]
    assert [part.call_id for message in said(CALL, second[0], second[1], RESULT)[1:] for part in message.parts] == [
        "c2", "c1"]


def test_notes_of_a_compaction_are_skipped():
    assert said({"type": "compaction", "encrypted_content": "x"}, USER) == said(USER)


@pytest.mark.parametrize("item, named", [
    ({"type": "computer_call"}, "computer_call"), ({"type": "message", "role": "robot", "content": ""}, "role"),
    ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
    (CALL | {"status": "incomplete"}, "status"), (RESULT, "'c1'"), ({"type": "item_reference", "id": "msg_9"}, "msg_9"),
    (RESULT | {"call_id": None}, "call_id"), ("text", "input[1]")])
def test_what_cannot_be_shown_is_refused_by_name(item, named):
    with pytest.raises(BadRequest) as refused:
        said(item)
    assert refused.value.status == 400 and named in str(refused.value)


@pytest.mark.parametrize("fields", [{"conversation": "c"}, {"background": True}, {"prompt": {"id": "p"}},
                                    {"truncation": "some"}, {"reasoning": {"summary": "long"}},
                                    {"text": {"format": {}}}, {"reasoning": {"effort": "huge"}},
                                    {"tools": [{"type": "function"}]}, {"tools": [BASH, BASH]},
                                    {"max_output_tokens": -1}, {"include": "all"}])
def test_fields_that_cannot_be_kept_are_refused(fields):
    with pytest.raises(BadRequest):
        read("Hi", **fields)


def test_null_and_unknown_fields_are_as_absent():
    fields = dict.fromkeys(["instructions", "tools", "reasoning", "include", "text", "store", "previous_response_id",
                            "conversation", "metadata", "tool_choice", "max_output_tokens", "truncation"])
    assert read("Hi", **fields, client_metadata={"a": 1}).turn.conversation == read("Hi").turn.conversation


# ---- tools

def tools(*declared):
    return read("Hi", tools=list(declared)).turn.conversation.tools


def test_a_function_is_shown_by_name_description_and_parameters():
    tool, strict = tools(BASH, BASH | {"name": "exact", "strict": True})
    assert tool.schema == {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}
    assert (tool.strict, strict.strict) == (False, True) and "strict" not in strict.schema


def test_hosted_tools_are_skipped():
    assert [tool.name for tool in tools({"type": "web_search"}, BASH, {"type": "mcp", "server_url": "x"})] == ["bash"]


def test_a_namespace_shows_its_functions_under_bare_names_unless_taken():
    other = SPACE | {"name": "mcp__more__"}
    assert [tool.name for tool in tools(SPACE, other)] == ["list", "mcp__more__list"]
    calls = [CALL | {"name": "list", "namespace": space["name"], "call_id": space["name"]} for space in (SPACE, other)]
    assert [part.name for part in said(*calls, USER, tools=[SPACE, other])[0].parts] == ["list", "mcp__more__list"]


def test_a_custom_tool_is_a_function_of_one_string_that_states_its_grammar():
    tool, = tools({"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark",
                                                                 "definition": "start: /.+/"}})
    text = tool.schema["parameters"]["properties"]["input"]
    assert text["type"] == "string" and "start: /.+/" in text["description"]


def test_tools_that_a_search_found_are_defined_where_its_result_stands():
    search = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "list"}}
    found = {"type": "tool_search_output", "call_id": "c1", "tools": [SPACE]}
    conversation = read([USER, search, found], tools=[BASH]).turn.conversation
    assert conversation.messages[-1].parts == (ToolResult("c1", (ToolReference("list"),)),)
    assert [(tool.name, tool.deferred) for tool in conversation.tools] == [("bash", False), ("list", True)]


def test_text_format_is_asked_for_as_a_chat_request_would():
    asked = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert read("Hi", text={"format": asked}).turn.conversation.response_format == {
        "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}


@pytest.mark.parametrize("effort, thinking", [("none", False), ("low", True), (None, True)])
def test_effort_none_is_no_reasoning(effort, thinking):
    assert read("Hi", reasoning={"effort": effort}).turn.conversation.thinking is thinking


# ---- a conversation by ids alone

def respond(server, items, **fields):
    return server.post("/v1/responses", json={"input": items, "reasoning": {"effort": "none"}, **fields})


BLOCK = ('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="a" string="true">ls'
         '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')


@pytest.fixture
def agent(serve, tokenizer):
    """A server that calls bash first and says "Done." to a result."""
    def answer(prompt):
        return tokenizer.encode_marked("Done." if "<tool_result>" in tokenizer.decode(prompt) else BLOCK)
    return serve(script=answer)


def results_of(response, output="a b"):
    return [{"type": "function_call_output", "call_id": item["call_id"], "output": output}
            for item in response["output"] if item["type"] == "function_call"]


def test_results_alone_go_on_from_the_live_state_as_the_whole_conversation_would(agent):
    first = respond(agent, [USER], tools=[BASH]).json()
    alone = respond(agent, results_of(first), tools=[BASH])
    prompt = agent.service.scheduler.slots[0].session.tokens[:alone.json()["usage"]["input_tokens"]]
    assert alone.headers["x-ds4mlx-cache-source"] == "responses-tool-output"
    assert alone.json()["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] + 1
    whole = respond(agent, [USER, *first["output"], *results_of(first)], tools=[BASH]).json()
    assert prompt == agent.service.scheduler.slots[0].session.tokens[:whole["usage"]["input_tokens"]]


def test_results_alone_may_go_on_more_than_once(serve):
    server = serve(BLOCK)
    response, lengths = respond(server, [USER], tools=[BASH]).json(), []
    for _ in range(3):
        response = respond(server, results_of(response), tools=[BASH]).json()
        lengths.append(response["usage"]["input_tokens_details"]["cached_tokens"])
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize("stream", [False, True])
def test_results_of_a_state_that_is_gone_are_a_409(agent, stream):
    first = respond(agent, [USER], tools=[BASH]).json()
    respond(agent, "Something else entirely")
    refused = respond(agent, results_of(first), tools=[BASH], stream=stream)
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "continuation_state_unavailable"


def test_results_too_long_for_the_state_are_refused_with_the_numbers(serve):
    server = serve(BLOCK, settings={"ctx": 2000})
    first = respond(server, "x" * 400, tools=[BASH]).json()
    results = results_of(first, "x" * (2000 - first["usage"]["total_tokens"]))   # short enough by themselves
    refused = respond(server, results, tools=[BASH])
    assert refused.status_code == 400 and "with what came before" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert respond(server, results_of(first), tools=[BASH]).status_code == 200


def test_results_of_a_call_that_was_the_last_that_fitted_follow_the_end_of_the_answer(serve, tokenizer):
    """An answer cut behind a whole call lacks its end, which is put there before its results."""
    server = serve(BLOCK)
    first = respond(server, [USER], tools=[BASH], max_output_tokens=len(tokenizer.encode_marked(BLOCK)) - 3).json()
    assert first["status"] == "incomplete" and [item["type"] for item in first["output"]] == ["function_call"]
    second = respond(server, results_of(first), tools=[BASH]).json()
    held = server.service.scheduler.slots[0].session.tokens
    assert held[first["usage"]["total_tokens"]] == tokenizer.eos and second["status"] == "completed"


def test_a_previous_response_stands_before_the_input(agent):
    first = respond(agent, [USER], tools=[BASH]).json()
    second = respond(agent, results_of(first), tools=[BASH], previous_response_id=first["id"])
    third = respond(agent, "More", tools=[BASH], previous_response_id=second.json()["id"]).json()
    assert second.json()["previous_response_id"] == first["id"]
    assert third["usage"]["input_tokens_details"]["cached_tokens"] == second.json()["usage"]["total_tokens"] + 1


def test_an_item_may_be_sent_by_its_id(agent):
    first = respond(agent, [USER], tools=[BASH]).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    second = respond(agent, [USER, *references, *results_of(first)], tools=[BASH])
    assert second.json()["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] + 1


def test_a_response_can_be_read_again_and_deleted(agent):
    first = respond(agent, "Hi").json()
    assert agent.client.get(f"/v1/responses/{first['id']}").json() == first
    assert agent.client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    for gone in (agent.client.get(f"/v1/responses/{first['id']}"), agent.client.delete(f"/v1/responses/{first['id']}")):
        assert gone.status_code == 404
    refused = respond(agent, "More", previous_response_id=first["id"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")


def test_a_streamed_response_is_stored_too(agent):
    text = respond(agent, "Hi", stream=True).text
    last = json.loads(text.rpartition("data: ")[2])["response"]
    assert agent.client.get(f"/v1/responses/{last['id']}").json() == last


def test_with_store_false_a_response_is_forgotten(agent):
    first = respond(agent, "Hi", store=False).json()
    assert first["store"] is False and agent.client.get(f"/v1/responses/{first['id']}").status_code == 404


def test_without_a_store_a_previous_response_is_a_400(serve):
    server = serve(settings={"responses_store": 0})
    first = respond(server, "Hi").json()
    refused = respond(server, "More", previous_response_id=first["id"])
    assert refused.status_code == 400 and "--responses-store" in refused.json()["error"]["message"]


def test_the_store_keeps_a_number_of_responses_and_an_amount_of_text():
    few, small = ResponseStore(2), ResponseStore(9, max_bytes=400)
    for i in range(4):
        for store in (few, small):
            store.keep({"id": f"resp_{i}", "output": [{"id": f"msg_{i}", "text": "x" * 30}]}, ["said"])
    assert [few.response(f"resp_{i}") is not None for i in range(4)] == [False, False, True, True]
    assert [small.response(f"resp_{i}") is not None for i in range(4)] == [False, False, True, True]
    assert few.item("msg_3")["text"] == "x" * 30 and few.item("msg_0") is None


def test_errors_name_the_fields_of_this_api(agent):
    impossible = {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#/nowhere"}}}
    for fields, param in (({"items": [spoke()]}, "input"), ({"items": "Hi", "text": impossible}, "text.format")):
        refused = respond(agent, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(serve):
    refused = respond(serve(settings={"ctx": 64}), "x" * 100)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input" and refused.json()["error"]["n_ctx"] == 64
