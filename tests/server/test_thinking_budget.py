"""`thinking.budget_tokens`: an end to reasoning where the server keeps to it, and nothing where it does not."""
import pytest

THINKING = {"type": "enabled", "budget_tokens": 5}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server(start_server, stop_server):
    """Its model would reason for forty tokens, and never say that it has ended."""
    shared = start_server("x" * 40, settings={"honor_thinking_budget": True})
    yield shared
    stop_server(shared)


def message(server, **fields):
    return server.chat(**{"thinking": THINKING, "temperature": 0, **fields})["choices"][0]["message"]


def test_reasoning_ends_after_as_many_tokens_and_the_answer_follows(server):
    said = message(server)
    assert (said["reasoning_content"], said["content"]) == ("x" * 5, "x" * 34)  # the fortieth gave way to the end


def test_a_budget_of_nothing_is_an_answer_at_once(server):
    said = message(server, thinking={"type": "enabled", "budget_tokens": 0})
    assert "reasoning_content" not in said and said["content"] == "x" * 39


def test_reasoning_that_ends_by_itself_is_left_alone(serve):
    server = serve("xx</think>yyyy", settings={"honor_thinking_budget": True})
    said = message(server)
    assert (said["reasoning_content"], said["content"]) == ("xx", "yyyy")


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_no_sampling_escapes_it(server, temperature):
    bias = {"logit_bias": {str(token): 100 for token in range(40)}}
    usage = server.chat(thinking=THINKING, temperature=temperature, **bias)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 6


def test_a_forced_call_comes_after_it(server):
    tool = {"type": "function", "function": {"name": "ls", "strict": True, "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}}
    said = message(server, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert said["reasoning_content"] == "x" * 5 and said["tool_calls"][0]["function"]["name"] == "ls"


def test_it_holds_in_the_messages_api(server):
    answer = server.post("/v1/messages", json={"messages": [USER], "thinking": THINKING, "temperature": 0}).json()
    assert [len(block[block["type"]]) for block in answer["content"]] == [5, 34]


@pytest.mark.parametrize("path, prompt, told", [
    ("/v1/responses", {"input": "Hi"}, ("output_tokens_details", "output_tokens")),
    ("/v1/completions", {"prompt": "Hi"}, ("completion_tokens_details", "completion_tokens"))])
def test_it_holds_in_the_other_apis(server, path, prompt, told):
    usage = server.post(path, json={**prompt, "thinking": THINKING, "temperature": 0}).json()["usage"]
    assert (usage[told[0]]["reasoning_tokens"], usage[told[1]]) == (6, 40)  # its end is a token of reasoning too


@pytest.mark.parametrize("budget", [-1, 1.5, "5", True])
def test_a_budget_that_is_no_number_of_tokens_is_refused(server, budget):
    refused = server.post(json={"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": budget}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking.budget_tokens")


def test_elsewhere_it_is_accepted_and_changes_nothing(serve):
    server = serve("x" * 40)
    assert message(server)["reasoning_content"] == "x" * 40
