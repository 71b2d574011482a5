"""Anthropic's own Python client on the server: a task with a tool in two turns, from memory and over a restart."""
import anthropic
import pytest

TOOLS = [{"name": "bash", "description": "Runs a command.", "input_schema": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}]
CALL = ('I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
SYSTEM = "You help with long things. " * 40


@pytest.fixture
def boot(start_server, stop_server, tokenizer, tmp_path):
    """boot(): a server over one cache directory that calls a tool, then tells what came; the one before stops."""
    running = []

    def answer(prompt):
        has_result = "<tool_result>" in tokenizer.decode(prompt)
        return tokenizer.encode_marked("done</think>I see a and b." if has_result else f"a plan</think>{CALL}")

    def start():
        for server in running:
            stop_server(server)
        running[:] = [start_server(script=answer, settings={"kv_disk_dir": tmp_path / "kv", "ctx": 16384})]
        return running[0]

    yield start
    for server in running:
        stop_server(server)


def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(server, history, streamed):
    fields = {"model": "claude-local", "max_tokens": 1000, "system": SYSTEM, "tools": TOOLS, "messages": history}
    with client(server) as sdk:
        if not streamed:
            return sdk.messages.create(**fields)
        with sdk.messages.stream(**fields) as stream:
            return stream.get_final_message()


def with_result(history, message):
    use = message.content[-1]
    return [*history, {"role": "assistant", "content": message.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "a b"}]}]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("restart", [False, True])
def test_a_tool_task_goes_on_from_what_was_computed(boot, streamed, restart):
    server, history = boot(), [{"role": "user", "content": "What is here?"}]
    first = ask(server, history, streamed)
    assert [part.type for part in first.content] == ["thinking", "text", "tool_use"]
    assert (first.stop_reason, first.content[-1].input) == ("tool_use", {"command": "ls"})
    second = ask(boot() if restart else server, with_result(history, first), streamed)
    before = first.usage.cache_creation_input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    assert second.usage.cache_read_input_tokens == before + 1  # with the end of the answer
    assert (second.content[-1].text, second.stop_reason) == ("I see a and b.", "end_turn")


def test_thinking_without_its_text_comes_back_by_its_signature(boot):
    server, history = boot(), [{"role": "user", "content": "What is here?"}]
    first = ask(server, history, False)
    first.content[0].thinking = ""
    assert ask(server, with_result(history, first), False).usage.cache_read_input_tokens > 1000
    one, other = (count(server, with_result(history, first)) for first.content[0].signature in (
        first.content[0].signature, "foreign"))
    assert one == other + len("a plan")


def count(server, history):
    with client(server) as sdk:
        return sdk.messages.count_tokens(model="any", messages=history, tools=TOOLS).input_tokens


def test_the_models_are_listed(server):
    with client(server) as sdk:
        assert [model.id for model in sdk.models.list()] == ["deepseek-v4-flash"]


def test_errors_are_the_clients_own(server):
    with client(server) as sdk, pytest.raises(anthropic.BadRequestError) as caught:
        sdk.messages.create(model="any", max_tokens=1, messages=[{"role": "user", "content": "x" * 9000}])
    assert "prompt is too long" in str(caught.value) and caught.value.request_id.startswith("req_")


def test_an_error_within_a_stream_is_raised(serve):
    server = serve()

    def fail():
        raise ArithmeticError("logits are not finite")

    server.stub.before_decode = fail
    with client(server) as sdk, pytest.raises(anthropic.APIStatusError, match="the engine failed"):
        with sdk.messages.stream(model="any", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]) as stream:
            stream.get_final_message()
