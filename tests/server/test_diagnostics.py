"""POST /tokenize: what a server makes of a text and of a conversation, where it was told to show that."""
import pytest

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server(start_server, stop_server):
    shared = start_server(settings={"diagnostics": True})
    yield shared
    stop_server(shared)


def tokenize(server, **body):
    answer = server.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_is_shown_as_ids_and_pieces(server, tokenizer):
    shown = tokenize(server, text="Hé")
    assert shown["ids"] == tokenizer.encode_literal("Hé") and (shown["count"], shown["text"]) == (3, "Hé")
    assert shown["pieces"] == ["H", r"\xc3", r"\xa9"]


def test_a_text_that_spells_a_control_token_is_text(server):
    assert tokenize(server, text="</think>")["pieces"] == list("</think>")


def test_a_chat_request_is_shown_as_the_prompt_that_it_costs(server):
    fields = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "ls"}}]}
    shown = tokenize(server, **fields)
    answered = server.post(json={**fields, "max_tokens": 1}).json()
    assert shown["count"] == len(shown["ids"]) == len(shown["pieces"]) == answered["usage"]["prompt_tokens"]
    assert "<｜User｜>Hi<｜Assistant｜><think>" in shown["text"] and '"name": "ls"' in shown["text"]


@pytest.mark.parametrize("body, param", [({}, "messages"), ({"text": 5}, "text"), ({"messages": []}, "messages")])
def test_what_cannot_be_shown_is_named(server, body, param):
    refused = server.post("/tokenize", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_it_needs_the_key_where_there_is_one(serve):
    server = serve(settings={"diagnostics": True, "api_key": "k"})
    assert server.post("/tokenize", json={"text": "a"}).status_code == 401
    assert server.post("/tokenize", json={"text": "a"}, headers={"x-api-key": "k"}).json()["count"] == 1


def test_a_server_that_was_not_told_to_has_nothing_there(serve):
    assert serve().post("/tokenize", json={"text": "a"}).status_code == 404
