"""An image in a request: refused in each API's words where a person sent it, named in its place where a tool did."""
import pytest

TEXT = {"type": "text", "text": "What is this?"}
CHAT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
RESPONSES = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}

# path -> what a person sends with an image in it, the image's type, and its place
ASKED = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": [TEXT, CHAT]}]}, "image_url",
                             "messages[0].content[1]"),
    "/v1/messages": ({"max_tokens": 9, "messages": [{"role": "user", "content": [TEXT, ANTHROPIC]}]}, "image",
                     "messages[0].content[1]"),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": [TEXT, ANTHROPIC]}]}, "image",
                                  "messages[0].content[1]"),
    "/v1/responses": ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hm"}, RESPONSES]}]},
                      "input_image", "input[0].content[1]"),
}
# path -> a tool's result with an image in it
RETURNED = {
    "/v1/chat/completions": {"messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "view", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a.png:"}, CHAT]}]},
    "/v1/messages": {"max_tokens": 9, "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "view", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [
            {"type": "text", "text": "a.png:"}, ANTHROPIC]}]}]},
    "/v1/responses": {"input": [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a.png:"},
                                                                     RESPONSES]}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_an_image_that_a_person_sends_is_a_400_that_says_what_to_do(server, path, stream):
    body, kind, place = ASKED[path]
    answer = server.post(path, json={**body, "stream": stream})
    told = answer.json()["error"]
    assert answer.status_code == 400 and told["type"] == "invalid_request_error"
    assert told["message"].startswith(f"{place} is of type '{kind}'; this model reads text only: describe it in words")
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error" and answer.json()["request_id"]
    else:
        assert told["param"] == ("input" if path == "/v1/responses" else place)


@pytest.mark.parametrize("path", RETURNED)
def test_an_image_that_a_tool_returns_is_named_in_its_place(start_server, stop_server, path):
    seen = []
    server = start_server(script=lambda prompt: seen.append(list(prompt)) or [ord("x")])
    try:
        answer = server.post(path, json=RETURNED[path])
        assert answer.status_code == 200, answer.text
        prompt = server.service.tokenizer.decode(seen[-1])
    finally:
        stop_server(server)
    kind = {"/v1/messages": "image", "/v1/responses": "input_image"}.get(path, "image_url")
    assert f"<tool_result>a.png:\n\n[Unsupported {kind}]</tool_result>" in prompt
