"""`ds4mlx trace`: a server's trace, explained."""
import json
import os
import signal
import stat
import subprocess
import sys

import httpx2
import pytest

from ds4mlx.gguf.writer import write_gguf
from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF

SYSTEM = {"role": "system", "content": "You help. " * 20}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """recorded(format, *questions): the trace of a server that was asked them, each a conversation of its own."""
    place = tmp_path_factory.mktemp("traces")
    write_gguf(place / "bytes.gguf", {"general.architecture": "deepseek4", "general.name": "bytes",
                                      "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "joyai-llm",
                                      "tokenizer.ggml.merges": ["a b"],
                                      "tokenizer.ggml.tokens": [*CONTROL_LITERALS, *BYTE_OF, "ab"]}, [])

    def serve(format, *questions):
        path = place / f"trace.{format}"
        command = [sys.executable, "-m", "ds4mlx", "serve", "--model", place / "bytes.gguf", "--engine", "stub",
                   "--no-lock", "--port", "0", "--trace", path, "--trace-format", format]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        url = process.stdout.readline().split()[-1]
        for question in questions:
            body = {"messages": [SYSTEM, {"role": "user", "content": question}], "thinking": False}
            assert httpx2.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        return path, process.communicate(timeout=60)[1]

    return serve


@pytest.fixture(scope="module")
def jsonl(recorded):
    return recorded("jsonl", "one saffron", "two saffron")[0]


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cache(number, **fields):
    return {"type": "cache", "request": number, "effective_prompt_tokens": 1000, "cache_source": "none"} | fields


def test_a_server_says_that_it_writes_a_trace_and_its_log_quotes_none_of_it(recorded):
    path, log = recorded("text", "saffron")
    assert f"trace: {path}, prompts and answers in full" in log and "saffron" not in log
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text("utf-8").count("saffron") >= 3


def test_the_body_is_in_the_trace_as_it_came(jsonl):
    asked = json.loads(jsonl.read_text("utf-8").splitlines()[0])
    assert json.loads(asked["raw"])["messages"][1]["content"] == "one saffron" and asked["stream"] is False
    assert asked["prompt"].endswith("one saffron<｜Assistant｜></think>")


def test_each_request_is_explained_in_a_table_and_in_words(ds4mlx, jsonl):
    lines = ds4mlx("trace", jsonl).out.splitlines()
    assert lines[0].startswith(f"2 requests in {jsonl}: ") and lines[2].split()[2] == "none"
    assert lines[5].startswith("1: none of ") and "no state is live" in lines[5]
    assert "the live state went back to that length; the prompt parts from the live state at token" in lines[6]
    assert "its text in messages[1] at byte" in lines[6]


def test_the_worst_misses_come_with_the_tokens_where_they_part(ds4mlx, jsonl):
    worst = ds4mlx("trace", jsonl).out.partition("Worst misses")[2]
    assert worst.index("\n1: ") < worst.index("\n2: ")
    marked = next(line for line in worst.splitlines() if " * " in line).split()
    assert [marked[3], marked[5]] == ["o", "t"]   # "one", "two"


def test_conversations_are_not_shown_but_for_those_tokens(ds4mlx, jsonl):
    shown = [ds4mlx("trace", jsonl).out, ds4mlx("trace", jsonl, "--json").out]
    assert not any("saffron" in text or "You help" in text for text in shown)


def test_json_has_the_numbers_and_the_words(ds4mlx, jsonl):
    told = json.loads(ds4mlx("trace", jsonl, "--json").out)
    first, second = told["requests"]
    assert told["worst"] == [1, 2] and first["computed"] == first["prompt"] == first["missed"]
    assert second["reused"] + second["computed"] == second["prompt"] and second["words"].endswith(".")
    assert 0 < second["missed"] == min(second["live"], second["prompt"]) - second["reused"]


@pytest.mark.parametrize("fields, said", [
    ({"cache_source": "memory-token", "cached_tokens": 900}, "900 of 1,000 tokens were there: the live state went on"),
    ({"cache_source": "disk-text", "cached_tokens": 900, "disk_cache_file": "ab.kvm"}, "on disk was read, ab.kvm"),
    ({"cache_source": "memory-rewind", "cached_tokens": 900, "slot": 2, "donor": 0},
     "900 of 1,000 tokens were there: slot 2 shares them with slot 0"),
    ({"rejected": {"0123456789.kvm": "made with 4-bit experts"}}, "01234567 was not used: made with 4-bit experts"),
    ({"tool_replay": {"canonical": 2, "missing_ids": 3}}, "calls of 2 messages were rendered anew, not repeated as "
                                                          "sampled: 3 ids are unknown"),
    ({"cache_source": "of-a-later-version", "cached_tokens": 9}, "9 of 1,000 tokens were there: of-a-later-version")])
def test_words_tell_where_it_came_from(ds4mlx, tmp_path, fields, said):
    assert said in ds4mlx("trace", write(tmp_path / "t", cache(1, **fields))).out


def test_the_last_decision_of_a_request_that_began_again_counts(ds4mlx, tmp_path):
    told = write(tmp_path / "t", cache(1, cached_tokens=500, cache_source="disk-text"), cache(1))
    assert "1: none of 1,000" in ds4mlx("trace", told).out


def test_a_request_that_never_began_is_said_to(ds4mlx, tmp_path):
    told = write(tmp_path / "t", {"type": "request", "request": 1, "prompt_tokens": 5},
                 {"type": "finish", "request": 1, "finish": "cancelled"})
    assert "1: it never began (cancelled)." in ds4mlx("trace", told).out


def test_the_rest_of_a_request_that_began_in_an_older_file_is_left_out(ds4mlx, tmp_path):
    told = write(tmp_path / "t", {"type": "token", "request": 1}, {"type": "finish", "request": 1}, cache(2))
    assert ds4mlx("trace", told).out.startswith("1 requests in ")


def test_a_line_that_is_being_written_is_left_out(ds4mlx, tmp_path):
    path = write(tmp_path / "t", cache(1))
    path.write_text(path.read_text() + '{"type": "cac')
    assert ds4mlx("trace", path).code == 0


def test_few_or_none_of_the_misses_may_be_asked_for(ds4mlx, tmp_path):
    told = write(tmp_path / "t", *(cache(number) for number in range(1, 9)))
    counts = [ds4mlx("trace", told, *options).out.count("might have been") for options in (
        (), ("--worst", "2"), ("--worst", "0"))]
    assert counts == [5, 2, 0]


def test_a_trace_cannot_steer_the_terminal(ds4mlx, tmp_path):
    evil = {"position": 1, "live": {"id": 1, "piece": "\x1b[2J"}, "prompt": None}
    told = write(tmp_path / "t", cache(1, because="\x1b]0;x\x07", rejected={"\x1b": "\x1b"}, first_mismatch=[evil]))
    assert "\x1b" not in ds4mlx("trace", told).out


@pytest.mark.parametrize("line", [
    "", "{}", "[1]", '{"type": "cache"}', "nonsense", "[" * 10_000,
    '{"type": "cache", "request": "x", "cached_tokens": [], "rejected": 5, "first_mismatch": [1, {"live": 3}]}',
    '{"type": "request", "time": 1e999}'])
def test_what_is_no_trace_is_one_line_or_nothing_to_tell(ds4mlx, tmp_path, line):
    (tmp_path / "t").write_text(line + "\n")
    result = ds4mlx("trace", tmp_path / "t")
    assert result.code in (0, 1) and "internal error" not in result.err and result.err.count("\n") == result.code


def test_a_trace_for_people_is_told_from_one_for_programs(ds4mlx, tmp_path):
    (tmp_path / "t").write_text("===== request 1 2026-11-30 10:00:00 =====\n")
    result = ds4mlx("trace", tmp_path / "t")
    assert result.code == 1 and "--trace-format jsonl" in result.err


@pytest.mark.parametrize("arguments, code", [([], 2), (["t", "--worst", "x"], 2), (["none"], 1)])
def test_misuse_is_one_line(ds4mlx, arguments, code):
    result = ds4mlx("trace", *arguments)
    assert result.code == code and result.out == "" and result.err.count("\n") == 1


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), os.mkdir])
def test_a_server_refuses_to_trace_into_what_is_no_file_of_its_own(start, tmp_path, make, tiny_path):
    make(tmp_path / "t")
    process = start("serve", "-m", tiny_path, "--engine", "stub", "--port", "0", "--no-lock", "--trace", "t")
    assert "--trace t: " in process.communicate(timeout=60)[1] and process.returncode == 2
    assert not (tmp_path / "elsewhere").exists()
