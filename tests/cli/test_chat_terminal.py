"""`ds4mlx chat` on a real terminal: a pseudo-terminal that types, pastes, interrupts and resizes."""
import json
import os
import re
import signal
import sys

import pexpect
import pytest

PROMPT = "ds4mlx>"     # the blank after it is a movement of the cursor
PASTE, PASTED = "\x1b[200~", "\x1b[201~"    # what terminals put around what is pasted
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
DIM = "\x1b[2m"
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")  # of a process with threads, here too


@pytest.fixture
def chat(tiny_path, tmp_path):
    """chat(*options): a chat on a terminal of 80 columns, waiting for the first message; stopped after the test."""
    started = []

    def run(*options, engine="stub", command=None, wait=True, **environment):
        arguments = ["-W", "error", "-m", "ds4mlx", "chat", "-m", str(tiny_path), "--engine", engine, *options]
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM")}
        child = pexpect.spawn(
            command or sys.executable, arguments, timeout=60, dimensions=(24, 80), echo=False, encoding="utf-8",
            codec_errors="replace", env=clean | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment})
        started.append(child)
        if wait:
            child.expect_exact(PROMPT)
        return child
    yield run
    for child in started:
        child.close(force=True)


def answered(child):
    """All that the terminal got up to the figures of the next answer."""
    child.expect(r"prefill: [\d.]+ t/s, generation")
    return child.before


def plain(text):
    """Text without what moves the cursor, colours or erases."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


def leave(child):
    child.expect_exact(PROMPT)
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def slow(chat, tmp_path):
    """A chat amid an answer that goes on for a minute."""
    (tmp_path / "words.txt").write_text("count " * 600)
    child = chat("--power", "1", "--nothink")
    child.send(f"/read {tmp_path}/words.txt\r")
    child.expect_exact("count count")
    return child


def test_a_typed_message_is_answered_and_ctrl_d_leaves(chat):
    child = chat()
    child.send("What does the river say?\r")
    assert plain(answered(child)).endswith("What does the river say?\n") and leave(child) == 0


def test_a_paste_of_several_lines_is_one_message(chat):
    child = chat()
    child.send(f"{PASTE}one\ntwo\n\nthree{PASTED}\r")
    assert plain(answered(child)).endswith("one\ntwo\n\nthree\n") and leave(child) == 0


def test_a_backslash_goes_on_in_the_next_line(chat):
    child = chat()
    child.send("one\\\r")
    child.expect(r"\s>\x1b")
    child.send("two\r")
    assert plain(answered(child)).endswith("one\ntwo\n")


def test_ctrl_c_while_it_answers_keeps_what_was_said(chat, tmp_path):
    child = slow(chat, tmp_path)
    child.send(CTRL_C)
    child.expect_exact("stopped\r\n")
    child.expect_exact(PROMPT)
    child.send(f"/save {tmp_path}/chat.json\r")
    child.expect_exact("saved")
    *_, question, answer = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert question["content"].startswith(answer["content"]) and 0 < len(answer["content"]) < len(question["content"])


def test_ctrl_c_while_the_prompt_is_computed_takes_the_message_back(chat, tmp_path):
    (tmp_path / "long.txt").write_text("the river goes on and on " * 1500)
    child = chat("--prefill-chunk", "128", engine="mlx")
    child.send(f"/read {tmp_path}/long.txt\r")
    child.expect(r"prefill .*[1-9]\d*/")    # some of it is done
    child.send(CTRL_C)
    child.expect_exact("the message is taken back")
    child.expect_exact(PROMPT)
    child.send("/stats\r")
    child.expect_exact("messages  0")


def test_ctrl_c_twice_leaves_with_130(chat):
    child = chat()
    child.send(CTRL_C)
    child.expect_exact("once more")
    child.expect_exact(PROMPT)
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_ctrl_c_soon_after_another_stops_the_next_answer_only(chat, tmp_path):
    child = slow(chat, tmp_path)
    for _ in range(2):
        child.send(CTRL_C)
        child.expect_exact("stopped\r\n")
        child.expect_exact(PROMPT)
        child.send(f"/read {tmp_path}/words.txt\r")
        child.expect_exact("count count")


def test_ctrl_c_twice_in_an_answer_leaves_and_gives_the_cursor_back(chat, tmp_path):
    (tmp_path / "long.txt").write_text("the river goes on and on " * 1500)
    child = chat("--prefill-chunk", "2048", engine="mlx")
    child.send(f"/read {tmp_path}/long.txt\r")
    child.expect_exact("\x1b[?25lprefill")     # without a cursor
    child.send(CTRL_C)
    while child.expect_exact(["\x1b[?25h", pexpect.TIMEOUT], timeout=0.2):
        child.send(CTRL_C)      # two at once may reach a busy process as one
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_a_window_may_change_its_size_at_the_prompt_and_in_an_answer(chat):
    child = chat("--power", "1", "--nothink")
    child.setwinsize(10, 30)
    child.send("count " * 12)
    child.setwinsize(40, 120)
    child.send("\r")
    child.expect("count count")
    child.setwinsize(8, 20)
    assert plain(answered(child)).endswith("count \n") and leave(child) == 0


def test_reasoning_is_dim_unless_colour_is_not_wanted(chat):
    shown = []
    for environment in ({}, {"NO_COLOR": "1"}):
        child = chat("-n", "12", "--temp", "0", engine="mlx", **environment)
        child.send("Why?\r")
        shown.append(answered(child))
        assert leave(child) == 0
    assert DIM in shown[0] and DIM not in shown[1] and "\x1b[31m" not in shown[1]


def test_a_dumb_terminal_is_sent_nothing_but_text(chat):
    child = chat("-n", "12", "--temp", "0", engine="mlx", TERM="dumb")
    child.send("Why?\r")
    assert "\x1b" not in answered(child)


def test_a_redirected_answer_is_clean_to_the_byte(chat, tmp_path):
    script = tmp_path / "to_a_file"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" >"{tmp_path}/out"\n')
    script.chmod(0o755)
    child = chat(command=str(script))
    child.send(f"{PASTE}中文 👩‍💻 \x1b[31m{PASTED}\r")
    answered(child)
    assert leave(child) == 0 and (tmp_path / "out").read_bytes() == "中文 👩‍💻 \x1b[31m\n".encode()


def test_a_model_cannot_command_the_terminal(chat):
    child = chat()
    child.send(f"{PASTE}\x1b[35mred{PASTED}\r")
    assert "\\x1b[35mred" in answered(child).splitlines()[-1]


def test_bytes_that_are_no_text_are_read_as_replacement_characters(chat, tmp_path):
    child = chat("--nothink")
    os.write(child.child_fd, b"a\xff\xfeb\r")
    answered(child)
    child.expect_exact(PROMPT)
    child.send(f"/save {tmp_path}/chat.json\r")
    child.expect_exact("saved")
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][-1]["content"] == "a\ufffd\ufffdb"


def test_what_was_typed_is_remembered_in_the_next_run(chat, tmp_path):
    child = chat()
    child.send("remember me\r")
    answered(child)
    assert leave(child) == 0
    again = chat()
    again.send(f"{UP}\r")
    assert plain(answered(again)).endswith("remember me\n")
    assert (tmp_path / "home" / "history").stat().st_mode & 0o777 == 0o600


def test_a_signal_from_elsewhere_stops_an_answer_too(chat, tmp_path):
    child = slow(chat, tmp_path)
    child.kill(signal.SIGINT)
    child.expect_exact("stopped\r\n")
