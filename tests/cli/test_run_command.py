"""`ds4mlx run`: an answer on standard output and nothing else there."""
import json
import os
import signal
import subprocess

import pytest


@pytest.fixture
def run(ds4mlx, tiny_path):
    """run(*arguments): on the scripted engine, which answers with the question."""
    return lambda *arguments: ds4mlx("run", "-m", tiny_path, "--engine", "stub", *arguments)


def test_the_answer_is_all_of_standard_output(run):
    result = run("-p", "What does the river say?")
    assert (result.code, result.out) == (0, "What does the river say?\n")
    assert "t/s" in result.err


def test_the_question_comes_from_a_file_or_standard_input(run, tmp_path, monkeypatch):
    (tmp_path / "question.txt").write_text("中文 👩‍💻\n", "utf-8")
    assert run("--prompt-file", "question.txt").out == "中文 👩‍💻\n"
    with open("question.txt") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run("--prompt-file", "-").out == "中文 👩‍💻\n"


def test_what_is_piped_in_follows_the_question(start, tiny_path):
    process = start("run", "-m", tiny_path, "--engine", "stub", "-p", "What is this?", stdin=subprocess.PIPE)
    assert process.communicate("one\ntwo\n", timeout=60)[0] == "What is this?\n\none\ntwo\n"


def test_a_pipe_without_anything_in_it_adds_nothing(start, tiny_path):
    process = start("run", "-m", tiny_path, "--engine", "stub", "-p", "What is this?", stdin=subprocess.PIPE)
    assert process.communicate("", timeout=60)[0] == "What is this?\n"


def test_a_pipe_of_bytes_that_are_no_text_is_refused(start, tiny_path, tmp_path):
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    with open(tmp_path / "picture") as stdin:
        process = start("run", "-m", tiny_path, "--engine", "stub", "-p", "What is this?", stdin=stdin)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == "ds4mlx run: -: byte 0 is not UTF-8; convert the file first\n"


def test_messages_come_from_a_pipe_too(start, tiny_path):
    process = start("run", "-m", tiny_path, "--engine", "stub", "--messages", "-", stdin=subprocess.PIPE)
    assert process.communicate('[{"role": "user", "content": "Hello"}]', timeout=60)[0] == "Hello\n"


def test_a_long_prompt_is_computed_once_over_several_runs(run, tmp_path):
    arguments = ["-p", "word " * 2500, "--nothink", "-n", "3", "--kv-disk-dir", tmp_path / "kv", "--format", "json"]
    first, second = (json.loads(run(*arguments).out)["usage"] for _ in range(2))
    assert first["cached_tokens"] == 0 and second["cached_tokens"] == 2048    # saved at multiples of that


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_question_that_cannot_be_read_is_one_line(run, tmp_path, content):
    if content is not None:
        (tmp_path / "q").write_bytes(content)
    result = run("--prompt-file", "q")
    assert result.code == 1 and result.out == "" and len(result.err.splitlines()) == 1


def test_json_is_one_object_with_reasoning_content_usage_and_timings(run):
    answer = json.loads(run("-p", "one two", "--format", "json").out)
    assert (answer["content"], answer["reasoning"], answer["finish_reason"]) == ("one two", "", "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] > usage["completion_tokens"] >= 2 and usage["cached_tokens"] == 0
    assert answer["timings"].keys() == {"prefill_s", "decode_s", "prefill_tps", "decode_tps"}


def test_a_stop_string_ends_the_answer_before_it(run):
    answer = json.loads(run("-p", "one two three", "--stop", "four", "--stop", "three", "--format", "json").out)
    assert (answer["content"], answer["finish_reason"], answer["stop_string"]) == ("one two ", "stop_string", "three")


def test_a_limit_ends_it_too(run):
    answer = json.loads(run("-p", "one two three four", "-n", "2", "--nothink", "--format", "json").out)
    assert answer["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 2


def test_reasoning_is_hidden_in_a_pipe_unless_asked_for(ds4mlx, tiny_path):
    arguments = ["run", "-m", tiny_path, "-p", "Why?", "-n", "12", "--temp", "0"]
    hidden, shown = ds4mlx(*arguments), ds4mlx(*arguments, "--show-thinking")
    answer = json.loads(ds4mlx(*arguments, "--format", "json").out)
    assert answer["reasoning"] and hidden.out.strip("\n") == answer["content"].strip("\n")
    assert shown.out.startswith(answer["reasoning"]) and "\x1b" not in shown.out


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(ds4mlx, tiny_path):
    def answer(seed):
        return ds4mlx("run", "-m", tiny_path, "-p", "Hi", "-n", "8", "--nothink", "--seed", seed).out
    assert answer(5) == answer(5) != answer(6)


def test_messages_come_from_a_file_with_their_tools(run, tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    call = ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">the moon'
            '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
    spoken = call.replace("｜DSML｜", "DSML｜")  # in ordinary tokens: the stub repeats text
    request = {"messages": [{"role": "user", "content": spoken}], "tools": tools, "thinking": False}
    (tmp_path / "request.json").write_text(json.dumps(request))
    answer = json.loads(run("--messages", "request.json", "--format", "json").out)
    assert answer["tool_calls"] == [{"name": "look", "arguments": '{"at":"the moon"}'}]
    assert json.loads(run("--messages", "request.json").out) == answer["tool_calls"][0]


def test_a_list_of_messages_alone_will_do(run, tmp_path):
    (tmp_path / "messages.json").write_text('[{"role": "user", "content": "Hello"}]')
    assert run("--messages", "messages.json").out == "Hello\n"


@pytest.mark.parametrize("content", ["", "{", "[]", "[1]", '{"messages": 5}', '[{"role": "king", "content": "a"}]',
                                     "[" * 5000, '{"messages": [{"role": "user", "content": NaN}]}'])
def test_messages_that_are_none_are_refused_in_one_line(run, tmp_path, content):
    (tmp_path / "messages.json").write_text(content)
    result = run("--messages", "messages.json")
    assert result.code == 1 and result.out == "" and len(result.err.splitlines()) == 1


def test_a_raw_prompt_has_no_markup(run):
    answer = json.loads(run("-p", "one two", "--raw-prompt", "--format", "json").out)
    assert answer["content"] == "<｜begin▁of▁sentence｜>one two"  # the stub repeats a prompt that has no question
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["completion_tokens"]


def test_a_prompt_longer_than_the_context_says_both_numbers(run):
    for flags in ([], ["--raw-prompt"]):
        result = run("-p", "word " * 200, "-c", "100", *flags)
        assert result.code == 1 and result.out == "" and "100" in result.err and "tokens" in result.err


def test_ctrl_c_keeps_what_was_produced_and_exits_with_130(start, tiny_path):
    process = start("run", "-m", tiny_path, "-p", "count " * 2000, "--nothink", "--engine", "stub", "--power", "1")
    first = os.read(process.stdout.fileno(), 100).decode()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and first and (first + rest).endswith("\n")
    assert "t/s" in errors and "Traceback" not in errors


@pytest.mark.parametrize("command", [["run", "--messages"], ["tokens", "--render"]])
def test_a_file_that_is_no_request_says_what_to_give(ds4mlx, tiny_path, tmp_path, command):
    (tmp_path / "bad.json").write_text("{")
    result = ds4mlx(*command, "bad.json", "-m", tiny_path)
    assert result.code == 1 and "bad.json: " in result.err and "give a chat request in JSON" in result.err
