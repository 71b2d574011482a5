"""`ds4mlx chat` with messages from a pipe: what each line does, and what goes where."""
import io
import json
import os
import re
from types import SimpleNamespace

import pytest


@pytest.fixture
def chat(ds4mlx, tiny_path, monkeypatch):
    """chat(*lines, options=): on the scripted engine, which answers with the question."""
    def run(*lines, options=()):
        raw = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw), isatty=lambda: False))
        return ds4mlx("chat", "-m", tiny_path, "--engine", "stub", "-c", "8192", *options)
    return run


def cached(errors):
    """Reused tokens of each answer."""
    return [int((re.search(r"cached (\d+)", line) or [0, 0])[1]) for line in errors.splitlines() if "t/s," in line]


def saved(path="chat.json"):
    with open(path) as file:
        return [(message["role"], message["content"]) for message in json.load(file)["messages"]]


def test_answers_are_all_of_standard_output(chat):
    result = chat("one", "two")
    assert (result.code, result.out) == (0, "one\ntwo\n") and result.err.count("t/s, generation") == 2


def test_no_command_is_a_chat(ds4mlx, tiny_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"hello\n"), isatty=lambda: False))
    assert ds4mlx("-m", tiny_path, "--engine", "stub").out == "hello\n"


def test_a_turn_computes_only_what_is_new(chat):
    result = chat("word " * 200, "more")
    first, second = cached(result.err)
    assert first == 0 and second >= 400     # two hundred words, said and repeated, a token each


def test_a_backslash_at_the_end_joins_the_next_line(chat):
    assert chat("one \\", "two", "three").out == "one \ntwo\nthree\n"


def test_bytes_that_are_no_text_are_told_of_and_read_as_replacement_characters(chat):
    result = chat(b"a\xff\xfeb")
    assert result.out == "a\ufffd\ufffdb\n" and "not UTF-8" in result.err


def test_undo_forgets_the_last_exchange(chat):
    chat("one", "two", "/undo", "/save chat.json")
    assert saved()[1:] == [("user", "one"), ("assistant", "one")]


def test_undo_goes_back_in_the_state_without_computing_it_again(chat):
    result = chat("word " * 300, "two", "/undo", "three")
    first, second, third = cached(result.err)
    assert first == 0 and second == third >= 600    # three hundred words, said and repeated


def test_retry_asks_the_last_question_again(chat):
    result = chat("one", "/retry", "/save chat.json")
    assert result.out == "one\none\n" and saved()[1:] == [("user", "one"), ("assistant", "one")]


def test_retry_draws_another_answer_even_with_a_seed(ds4mlx, tiny_path, monkeypatch):
    raw = b"Hi\n/save a.json\n/retry\n/save b.json\n"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw), isatty=lambda: False))
    ds4mlx("chat", "-m", tiny_path, "-n", "8", "--nothink", "--seed", "5")
    assert saved("a.json")[:2] == saved("b.json")[:2] and saved("a.json")[2] != saved("b.json")[2]


def test_a_conversation_goes_on_from_a_file(chat):
    chat("one", "/save chat.json")
    result = chat("/load chat.json", "two", "/save chat.json")
    assert "loaded chat.json: 2 messages" in result.err
    assert [text for _, text in saved()[1:]] == ["one", "one", "two", "two"]


def test_a_kept_conversation_goes_on_in_the_next_run(chat, tmp_path):
    chat("one", options=["--keep", "river"])
    chat("two", options=["--keep", "river"])
    assert [text for _, text in saved(tmp_path / "home" / "chats" / "river.json")[1:]] == ["one", "one", "two", "two"]


def test_a_kept_conversation_is_not_computed_again_where_states_are_on_disk(chat):
    options = ["--keep", "river", "--kv-disk-dir", "kv", "--nothink"]
    chat("word " * 600, options=options)
    assert cached(chat("two", options=options).err)[0] >= 1200     # what was said and what was answered


def test_a_file_is_sent_as_a_message(chat, tmp_path):
    (tmp_path / "question.txt").write_text("from\na file")
    assert chat("/read question.txt").out == "from\na file\n"


def test_the_system_text_is_given_and_replaced(chat):
    chat("/save a.json", "/system Be brief.", "/save b.json", "/system", "/save c.json", options=["-sys", "Be long."])
    assert [saved(name) for name in ("a.json", "b.json", "c.json")] == [
        [("system", "Be long.")], [("system", "Be brief.")], []]


def test_the_system_text_may_be_in_a_file(chat, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.\n")
    chat("/save a.json", options=["--system-file", "system.txt"])
    assert saved("a.json") == [("system", "Be brief.")]


def test_reset_forgets_all_but_the_system_text(chat):
    chat("one", "/reset", "/save chat.json", options=["-sys", "s"])
    assert saved() == [("system", "s")]


@pytest.mark.parametrize("line, thinking", [("/nothink", "off"), ("/think", "on"), ("/think low", "low"),
                                            ("/think-max", "max")])
def test_thinking_is_switched(chat, line, thinking):
    assert f"thinking: {thinking}" in chat(line).err


def test_a_new_effort_says_that_the_conversation_is_computed_again(chat):
    assert "computed again" in chat("one", "/think high").err and "computed again" not in chat("/think high").err


def test_another_context_keeps_the_conversation(chat):
    result = chat("one", "/ctx 4096", "two", "/save chat.json")
    assert result.code == 0 and "context: 4096 tokens" in result.err and len(saved()) == 5


def test_a_message_that_does_not_fit_is_taken_back_and_fails_a_pipe(chat):
    result = chat("word " * 9000, "one", "/save chat.json")
    assert result.code == 1 and "8192 tokens" in result.err and result.out == "one\n"
    assert saved()[1:] == [("user", "one"), ("assistant", "one")]


def test_the_limit_of_an_answer_is_told(chat):
    result = chat("one two three four five six", options=["-n", "3"])
    assert "stopped at the limit: 3 tokens" in result.err and "context" not in result.err


def test_a_context_that_is_full_says_what_to_do(chat):
    assert "the context of 500 tokens is full" in chat("word " * 300, options=["-c", "500"]).err


def test_statistics_and_help_go_to_standard_error(chat):
    result = chat("/help", "/stats")
    assert result.out == "" and "/undo" in result.err and "8,192 tokens" in result.err


@pytest.mark.parametrize("line, told", [
    ("/rest", "did you mean /reset?"), ("/xyzzy", "no command /xyzzy"), ("/ctx", "/ctx needs N"),
    ("/ctx many", "--ctx is 'many'"), ("/power 0", "--power is '0'"), ("/reset now", "takes nothing"),
    ("/undo", "nothing"), ("/retry", "nothing"), ("/think hard", "low, high or max"),
    ("/read none.txt", "No such file"), ("/load none.json", "No such file"), ("/save no/folder/x", "not saved")])
def test_a_command_that_cannot_be_is_one_line_and_the_chat_goes_on(chat, line, told):
    result = chat(line, "on")
    assert result.code == 1 and told in result.err.splitlines()[0] and result.out == "on\n"


def test_colour_in_a_pipe_is_for_who_asks(chat):
    assert "\x1b[31m" in chat("/xyzzy", options=["--color", "always"]).err and "\x1b" not in chat("/xyzzy").err


def test_the_duty_cycle_is_set(chat):
    assert "power: 50 %" in chat("/power 50").err


def test_without_standard_input_there_is_nothing_to_say(start, tiny_path):
    process = start("chat", "-m", tiny_path, "--engine", "stub", preexec_fn=lambda: os.close(0))
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def test_a_reader_that_leaves_ends_the_chat_without_a_traceback(start, tiny_path, tmp_path):
    (tmp_path / "lines").write_text("one\n")
    with open(tmp_path / "lines") as lines:
        process = start("chat", "-m", tiny_path, "--engine", "stub", stdin=lines)
    process.stdout.close()
    process.wait(60)
    assert "Traceback" not in process.stderr.read() and process.returncode == 1


def test_a_path_is_no_command(chat):
    assert chat("/usr/bin is what?").out == "/usr/bin is what?\n"


@pytest.mark.parametrize("leave", ["/quit", "/exit"])
def test_quit_leaves(chat, leave):
    result = chat("one", leave, "two")
    assert (result.code, result.out) == (0, "one\n")


@pytest.mark.parametrize("options, told", [
    (["--keep", "../x"], "--keep"), (["-sys", "a", "--system-file", "b"], "--system-file"), (["--system"], "--system"),
    (["--ctx", "0"], "--ctx"), (["--colour", "auto"], "--colour")])
def test_misuse_exits_2_and_names_the_option(chat, options, told):
    result = chat(options=options)
    assert result.code == 2 and result.out == "" and told in result.err.splitlines()[0]
