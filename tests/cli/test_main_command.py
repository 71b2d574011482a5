"""What every command has in common: help, misuse, errors, exit codes."""
import os
import re

import pytest

from ds4mlx.cli.topics import TOPICS
from ds4mlx.config import COMMANDS


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_names_every_command_on_standard_output(ds4mlx, arguments):
    result = ds4mlx(*arguments)
    assert result.code == 0 and result.err == "" and all(f"\n    {command} " in result.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_is_found_in_three_places(ds4mlx, command):
    shown = [ds4mlx(*arguments) for arguments in ([command, "--help"], ["help", command], ["--help", command])]
    assert shown[0].out.startswith(f"usage: ds4mlx {command}") and [r.out for r in shown] == [shown[0].out] * 3
    assert all(result.code == 0 and result.err == "" for result in shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_named_and_the_usage_is_short(ds4mlx, command):
    result = ds4mlx(command, *(["bash"] if command == "completion" else []), "--frobnicate=5")
    first, *usage = result.err.splitlines()
    assert first == f"ds4mlx {command}: unknown option: --frobnicate"
    assert result.code == 2 and result.out == "" and 1 <= len(usage) <= 3 and usage[0].startswith("usage: ds4mlx")


@pytest.mark.parametrize("arguments, meant", [
    (["run", "--promt", "x"], "--prompt"), (["serve", "--prot", "1"], "--port"), (["rum"], "run"),
    (["cache", "ls", "--kv-disc-dir", "x"], "--kv-disk-dir"), (["run", "--temperature=1"], "--temp"),
    (["--nothnk"], "--nothink"), (["run", "--tok", "3"], "--tokens"),
    (["help", "smpling"], "sampling"), (["--help", "exit-code"], "exit-codes")])
def test_what_was_meant_is_named(ds4mlx, arguments, meant):
    result = ds4mlx(*arguments)
    assert result.code == 2 and result.out == "" and f"did you mean {meant}?" in result.err.splitlines()[0]


def test_what_is_like_nothing_is_no_suggestion(ds4mlx):
    assert "did you mean" not in ds4mlx("logprobs", "--temp", "0").err


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_of_help_is_found_in_two_places_and_named_in_the_list(ds4mlx, topic):
    shown = [ds4mlx("help", topic), ds4mlx("--help", topic)]
    assert all(result.code == 0 and result.err == "" and result.out == TOPICS[topic] for result in shown)
    assert topic in ds4mlx("help").out


def test_topics_name_options_that_there_are(ds4mlx):
    known = set(re.findall(r"--[a-z][a-z-]+", "".join(ds4mlx(command, "--help").out for command in COMMANDS)))
    named = set(re.findall(r"--[a-z][a-z-]+", "".join(TOPICS.values())))
    assert named - known == {"--help"} - known


@pytest.mark.parametrize("arguments, told", [
    (["run", "-p"], "-p/--prompt"), (["run", "-p", "a", "--ctx", "x"], "--ctx"), (["run", "-p", "a", "--format", "xml"],
    "--format"), (["run", "-p", "a", "--think", "--nothink"], "--nothink"), (["run", "-p", "a", "b"], "b"),
    (["run"], "--prompt"), (["run", "-p", "a", "--prompt-file", "f"], "--prompt-file"), (["nonsense"], "nonsense"),
    (["run", "--messages", "f", "--raw-prompt"], "--raw-prompt"),
    (["run", "--messages", "f", "-sys", "a"], "--system"),
    (["run", "-p", "a", "--raw-prompt", "-sys", "a"], "--system"),
    (["logits", "f", "-p", "a"], "FILE"), (["logprobs", "-p", "a", "--logprobs-top-k", "129"], "--logprobs-top-k"),
    (["run", "-p", "a", "--config", "none.toml"], "none.toml"), (["run", "-p", "a", "--temperature", "1"],
    "--temperature"), (["run", "-p", "a", "--top", "1"], "--top"), (["--help", "nonsense"], "nonsense")])
def test_misuse_is_one_clear_line_that_names_the_option(ds4mlx, arguments, told):
    result = ds4mlx(*arguments)
    assert result.code == 2 and result.out == "" and told in result.err.splitlines()[0]
    assert "Traceback" not in result.err


@pytest.mark.parametrize("content", [b"", b"plain text, no model", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
@pytest.mark.parametrize("command", [["run", "-p", "a"], ["logits", "-p", "a"], ["tokens", "-p", "a"], ["inspect"]])
def test_a_file_that_is_no_model_is_one_line_and_exit_1(ds4mlx, tmp_path, command, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    result = ds4mlx(*command, "-m", "bad.gguf")
    assert result.code == 1 and result.out == "" and len(result.err.splitlines()) == 1 and "bad.gguf" in result.err


def test_a_missing_model_says_what_was_looked_for_and_how_to_get_one(ds4mlx):
    result = ds4mlx("run", "-p", "a", "-m", "no/such.gguf")
    assert result.code == 1 and "no/such.gguf" in result.err and "download.sh" in result.err


def test_options_of_ds4_that_do_nothing_here_are_accepted_with_one_warning(ds4mlx, tiny_path):
    result = ds4mlx("run", "-p", "a", "-m", tiny_path, "--engine", "stub", "--metal", "-t", "4", "--mtp", "x.gguf",
                    "--mtp-draft=2", "--nothink")
    warnings = [line for line in result.err.splitlines() if "ds4" in line]
    assert result.code == 0 and result.out == "a\n" and len(warnings) == 1
    assert all(option in warnings[0] for option in ("--metal", "-t", "--mtp", "--mtp-draft"))


def test_output_is_utf_8_whatever_the_locale(start, tiny_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = start("run", "-p", "中文", "-m", tiny_path, "--engine", "stub", env=environment, encoding="utf-8")
    assert process.communicate(timeout=60)[0] == "中文\n" and process.returncode == 0


def test_debug_shows_where_an_error_came_from(start):
    process = start("run", "-p", "a", "-m", "no.gguf", "--debug")
    assert "Traceback" in process.communicate(timeout=60)[1] and process.returncode == 1


def test_a_reader_that_leaves_early_is_no_error_message(start, tiny_path):
    process = start("logits", "-p", "a", "-m", tiny_path)
    process.stdout.close()
    process.wait(60)
    assert "Traceback" not in process.stderr.read() and process.returncode == 1


@pytest.mark.parametrize("command", [["tokens", "-p", "a"], ["run", "-p", "a", "--engine", "stub"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_about_the_output(start, tiny_path, command):
    with open("/dev/full", "w") as full:
        process = start(*command, "-m", tiny_path, stdout=full)
        lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 1 and len(lines) == 1 and "output cannot be written (No space" in lines[0]


def test_closed_standard_input_is_one_line(start, tiny_path):
    process = start("tokens", "-m", tiny_path, "--prompt-file", "-", preexec_fn=lambda: os.close(0))
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and errors == "ds4mlx tokens: -: standard input is closed; give the path of a file\n"
