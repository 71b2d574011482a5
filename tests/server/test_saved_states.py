"""Conversations over a restart: what was computed once is read from disk, and what the client changed is not."""
import json
import stat
import threading

import pytest

from ds4mlx.engine.stub import Gate

CALL = ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}}}}]
SYSTEM = {"role": "system", "content": "You help with long things. " * 60}


@pytest.fixture
def boot(start_server, stop_server, tmp_path):
    """boot(answer): a server over one cache directory; the server before is stopped first."""
    running = []

    def start(answer, **settings):
        for server in running:
            stop_server(server)
        running[:] = [start_server(answer, settings={"kv_disk_dir": tmp_path / "kv", "ctx": 16384, **settings})]
        return running[0]

    yield start
    for server in running:
        stop_server(server)


def ask(server, history, **fields):
    """One request; the assistant's message, as a client keeps it, and what was reused of how many tokens."""
    answer = server.post(json={"messages": history, **fields})
    choice = answer.json()["choices"][0]["message"]
    kept = {key: value for key, value in choice.items() if key in ("role", "content", "tool_calls")}
    usage = answer.json()["usage"]
    return kept, answer.headers["x-ds4mlx-cache-source"], usage["prompt_tokens_details"]["cached_tokens"], usage


def test_the_next_turn_after_a_restart_is_read_from_disk(boot):
    history = [SYSTEM, {"role": "user", "content": "Hi"}]
    message, source, cached, first = ask(boot("plan</think>Done."), history)
    assert (source, cached) == ("none", 0)
    history += [message, {"role": "user", "content": "More"}]
    _, source, cached, usage = ask(boot("plan</think>Done."), history)
    assert (source, cached) == ("disk-text", first["total_tokens"] + 1)


def test_another_conversation_comes_back_after_it_was_replaced(boot):
    server = boot("plan</think>Done.")
    one = [SYSTEM, {"role": "user", "content": "first " * 200}]
    message, *_ = ask(server, one)
    _, source, *_ = ask(server, [{"role": "user", "content": "second " * 300}])
    assert source == "none"
    server.service.scheduler.store.flush()
    _, source, cached, _ = ask(server, [*one, message, {"role": "user", "content": "More"}])
    assert source == "disk-text" and cached > 1000


def test_a_system_text_is_shared_by_conversations(boot):
    ask(boot("plan</think>Done."), [SYSTEM, {"role": "user", "content": "first " * 20}])
    _, source, cached, _ = ask(boot("plan</think>Done."), [SYSTEM, {"role": "user", "content": "second " * 20}])
    assert source == "disk-text" and cached >= 1600   # up to the first question


@pytest.mark.parametrize("restart", [False, True])
def test_a_sampled_call_is_repeated_by_its_id(boot, restart):
    server, history = boot("plan</think>Look." + "\n\n" + CALL), [SYSTEM, {"role": "user", "content": "List"}]
    message, *_, first = ask(server, history, tools=TOOLS)
    call = message["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"} and call["id"].startswith("call_")
    server = boot("plan</think>Done.") if restart else server
    history += [message, {"role": "tool", "tool_call_id": call["id"], "content": "a b"}]
    _, source, cached, _ = ask(server, history, tools=TOOLS)
    assert cached == first["total_tokens"] + 1
    assert source == ("disk-text" if restart else "chat-tool-output")


def test_an_edited_question_goes_back_to_before_it(boot):
    server = boot("plan</think>Done.")
    ask(server, [SYSTEM, {"role": "user", "content": "one way"}])
    _, source, cached, _ = ask(server, [SYSTEM, {"role": "user", "content": "another way"}])
    assert source == "memory-rewind" and cached >= 1600


def test_the_directory_and_its_files_are_private(boot, tmp_path):
    ask(boot("plan</think>Done."), [SYSTEM, {"role": "user", "content": "Hi"}])
    boot("plan</think>Done.")
    files = [path for path in (tmp_path / "kv").iterdir() if path.suffix == ".kvm"]
    assert files and stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_damaged_file_costs_a_prefill_and_no_error(boot, tmp_path):
    history = [SYSTEM, {"role": "user", "content": "Hi"}]
    message, *_ = ask(boot("plan</think>Done."), history)
    server = boot("plan</think>Done.")
    for path in (tmp_path / "kv").glob("*.kvm"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    _, source, cached, _ = ask(server, [*history, message, {"role": "user", "content": "More"}])
    assert (source, cached) == ("none", 0)


def test_a_stream_tells_at_its_end_what_was_reused(boot):
    server, body = boot("plan</think>Done."), {"messages": [SYSTEM, {"role": "user", "content": "Hi"}], "stream": True}
    server.post(json=body)
    lines = server.post(json={**body, "stream_options": {"include_usage": True}}).text.splitlines()
    told = json.loads([line for line in lines if '"usage":{' in line][0].removeprefix("data: "))["ds4mlx"]
    assert told["cache_source"] == "memory-rewind" and told["cache"].startswith("memory-rewind; reused=")


def test_what_admitted_and_queued_requests_may_go_on_from_is_protected_until_they_have_ended(boot):
    server, gate = boot("plan</think>Done."), Gate()
    store, server.stub.before_prefill = server.service.scheduler.store, gate
    asking = [threading.Thread(target=server.chat, args=(text,)) for text in ("One", "Two")]
    for thread in asking:
        thread.start()
    while len(store._protected) < 2:
        pass
    protected = b" ".join(store._protected.values())
    assert gate.reached.wait(60) and b"One" in protected and b"Two" in protected
    gate.opened.set()
    for thread in asking:
        thread.join(60)
    while server.service.health.active:
        pass
    assert store._protected == {}
