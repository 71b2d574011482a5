"""POST /v1/completions: what a prompt may be, what it is answered with, whole and streamed."""
import json

import openai
import pytest

from ds4mlx.text.segments import ASSISTANT, BOS, THINK_CLOSE, USER


def ask(server, prompt="Hi", **fields):
    return server.post("/v1/completions", json={"prompt": prompt, "thinking": False, **fields})


def events(server, prompt="Hi", **fields):
    with server.client.stream("POST", "/v1/completions",
                              json={"prompt": prompt, "thinking": False, "stream": True, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


def error(answer):
    return answer.status_code, answer.json()["error"]


@pytest.fixture
def mirror(serve):
    """mirror(prompt, **fields): the prompt's ids as the engine got them."""
    prompts = []
    server = serve(script=lambda prompt: prompts.append(list(prompt)) or [])

    def ids(prompt, **fields):
        assert ask(server, prompt, **fields).status_code == 200
        return prompts[-1]
    return ids


def test_a_prompt_is_a_question(mirror, tokenizer):
    assert mirror("Hi") == tokenizer.encode_marked(f"{BOS}{USER}Hi{ASSISTANT}{THINK_CLOSE}")
    assert mirror(["Hi"]) == mirror("Hi")


def test_a_raw_prompt_is_gone_on_with_and_cannot_hold_control_tokens(mirror, tokenizer):
    assert mirror("Once", raw=True) == tokenizer.encode_marked(f"{BOS}Once")
    assert mirror(USER, raw=True) == [tokenizer.control[BOS], *tokenizer.encode_literal(USER)]


def test_ids_are_taken_as_they_are(mirror):
    assert mirror([0, 30, 31]) == mirror([[0, 30, 31]]) == [0, 30, 31]


def test_the_answer_is_a_text_completion(server):
    answer = ask(server, model="mine").json()
    assert answer["id"].startswith("cmpl-") and (answer["object"], answer["model"]) == ("text_completion", "mine")
    assert answer["choices"] == [{"index": 0, "text": "Hello.", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == len("Hello.")


@pytest.mark.parametrize("fields, text, finish", [({"max_tokens": 3}, "Hel", "length"), ({"stop": "l"}, "He", "stop"),
                                                  ({"max_tokens": 0}, "", "length"), ({}, "Hello.", "stop")])
@pytest.mark.parametrize("prompt", ["Hi", [0, 30]])
def test_a_stream_adds_up_to_the_whole_answer(server, prompt, fields, text, finish):
    whole = ask(server, prompt, **fields).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(server, prompt, **fields)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == text
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == finish
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])


def test_reasoning_stands_beside_the_text(serve):
    server = serve("plan</think>Done.")
    choice = ask(server, thinking=True).json()["choices"][0]
    assert (choice["reasoning_content"], choice["text"]) == ("plan", "Done.")
    chunks = [chunk["choices"][0] for chunk in events(server, thinking=True)]
    assert "".join(chunk.get("reasoning_content", "") for chunk in chunks) == "plan"
    assert "".join(chunk["text"] for chunk in chunks) == "Done."


def test_usage_comes_last_and_only_when_asked_for(server):
    asked = events(server, stream_options={"include_usage": True})
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["completion_tokens"] == len("Hello.")
    assert all(chunk["usage"] is None for chunk in asked[:-1])
    assert all("usage" not in chunk for chunk in events(server))


def test_logprobs_are_lists_with_the_place_of_each_token(serve):
    logprobs = ask(serve("aä!"), logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa4", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert all(len(top) == 2 and top[token] == probability for top, token, probability in
               zip(logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"]))


def test_streamed_logprobs_add_up_to_those_of_the_whole_answer(server):
    whole = ask(server, logprobs=1).json()["choices"][0]["logprobs"]
    parts = [part for chunk in events(server, logprobs=1) if (part := chunk["choices"][0]["logprobs"])]
    assert {key: [value for part in parts for value in part[key]] for key in whole} == whole


def test_without_alternatives_there_are_none(server):
    logprobs = ask(server, logprobs=0).json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len("Hello.") and logprobs["top_logprobs"] is None


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], {"a": 1}])
def test_anything_else_than_one_prompt_is_refused(server, prompt):
    status, told = error(ask(server, prompt))
    assert (status, told["param"]) == (400, "prompt")


@pytest.mark.parametrize("token", [-1, 10**6, 10**30])
def test_ids_must_name_tokens(server, token):
    status, told = error(ask(server, [0, token]))
    assert (status, told["param"]) == (400, "prompt") and "no token has the id" in told["message"]


@pytest.mark.parametrize("field, value", [("echo", True), ("suffix", "end"), ("best_of", 2), ("n", 2), ("logprobs", 21),
                                          ("raw", "yes"), ("max_tokens", -1)])
def test_what_cannot_be_done_is_refused_by_name(server, field, value):
    status, told = error(ask(server, **{field: value}))
    assert status == 400 and field in told["message"]


def test_what_asks_for_nothing_is_no_fault(server):
    assert ask(server, echo=False, suffix="", best_of=1, n=1, user="me", anything={"a": []}).status_code == 200


@pytest.mark.parametrize("prompt, fields", [("x" * 5000, {}), ("x" * 5000, {"raw": True}), ([30] * 5000, {})])
def test_a_prompt_over_the_context_says_by_how_much(server, prompt, fields):
    status, told = error(ask(server, prompt, **fields))
    assert (status, told["code"], told["param"]) == (400, "context_length_exceeded", "prompt")
    assert told["n_prompt_tokens"] >= 5000 and told["n_ctx"] == 4096


def test_a_repeated_raw_prompt_is_not_computed_again(serve):
    server = serve()
    first, again = (ask(server, "long " * 100, raw=True).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] == len("long ") * 100 + 1


def test_a_failure_within_a_stream_is_an_error_then_done(serve):
    server, steps = serve(), iter(range(100))

    def fail():
        if next(steps) == 3:
            raise ArithmeticError("logits are not finite")
    server.stub.before_decode = fail
    chunks = events(server)
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "Hel"


def test_the_openai_client_reads_completions_whole_and_streamed(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        fields = {"model": "any", "prompt": "Hi", "logprobs": 1, "extra_body": {"thinking": False}}
        assert client.completions.create(**fields).choices[0].text == "Hello."
        chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello."
    assert chunks[-1].choices[0].finish_reason == "stop"
