"""`ds4mlx serve` as a process: it says where it listens, answers, and leaves when told."""
import json
import re
import signal
import subprocess
import sys

import httpx2
import pytest

from ds4mlx.config import Settings
from ds4mlx.gguf.writer import write_gguf
from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF

BODY = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 50}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A GGUF file with a vocabulary of bytes and no weights: all that the stub engine needs."""
    path = tmp_path_factory.mktemp("model") / "vocabulary.gguf"
    write_gguf(path, {"general.architecture": "deepseek4", "general.name": "bytes", "tokenizer.ggml.model": "gpt2",
                      "tokenizer.ggml.pre": "joyai-llm", "tokenizer.ggml.merges": ["a b"],
                      "tokenizer.ggml.tokens": [*CONTROL_LITERALS, *BYTE_OF, "ab"]}, [])
    return path


@pytest.fixture
def serve(vocabulary):
    """serve(*flags): a process that has said where it listens, as (process, base URL)."""
    processes = []

    def start(*flags):
        command = [sys.executable, "-m", "ds4mlx", "serve", "--model", str(vocabulary), "--engine", "stub", "--no-lock",
                   "--port", "0", *flags]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        line = processes[-1].stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), processes[-1].communicate(timeout=60)[1]
        return processes[-1], line.split()[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=60)


def test_it_answers_then_a_signal_ends_it_with_0(serve):
    process, url = serve()
    answer = httpx2.post(f"{url}/v1/chat/completions", json=BODY, trust_env=False, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "Hello."
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.startswith("loading ") and "model: Scripted stub" in err
    assert "gen=7 finish=stop" in err and "Hello" not in err


def test_an_active_answer_ends_before_the_server_does(serve):
    process, url = serve("--power", "1")  # about 1 % of the time: slow enough to be told in the middle
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}, trust_env=False,
                       timeout=60) as answer:
        lines = answer.iter_lines()
        assert any('"content":"H' in line for line in lines)  # it has left the queue
        process.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_second_signal_ends_it_at_once_with_1(serve):
    process, url = serve("--power", "1", "--drain-seconds", "60")
    with httpx2.stream("POST", f"{url}/v1/chat/completions", trust_env=False, timeout=60,
                       json={"messages": [{"role": "user", "content": "x" * 2000}], "stream": True}) as answer:
        lines = answer.iter_lines()     # kept: when it goes, so does the client, and with it the active request
        assert any('"content":"x' in line for line in lines)
        process.send_signal(signal.SIGINT)
        assert any("stopping" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1


def test_a_port_in_use_is_exit_1_with_the_reason(serve, vocabulary):
    _, url = serve()
    port = url.rsplit(":", 1)[1]
    second = subprocess.run([sys.executable, "-m", "ds4mlx", "serve", "--model", vocabulary, "--engine", "stub",
                             "--no-lock", "--port", port], capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_cache_directory_that_cannot_be_used_is_exit_1_with_the_reason(vocabulary, tmp_path):
    (tmp_path / "kv").write_text("a file")
    refused = subprocess.run([sys.executable, "-m", "ds4mlx", "serve", "--model", vocabulary, "--engine", "stub",
                              "--no-lock", "--port", "0", "--kv-disk-dir", tmp_path / "kv"],
                             capture_output=True, text=True, timeout=60)
    complaints = [line for line in refused.stderr.splitlines() if "kv" in line]
    assert refused.returncode == 1 and len(complaints) == 1 and "give a --kv-disk-dir" in complaints[0]
    assert "Traceback" not in refused.stderr


def test_as_json_all_that_it_tells_is_an_object_a_line_without_the_prompt(serve):
    process, url = serve("--log-json", "--access-log", "--log-level", "debug")
    answer = httpx2.post(f"{url}/v1/chat/completions", json=BODY, trust_env=False, timeout=60,
                         headers={"authorization": "Bearer s3cret"})
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[1]
    lines = [json.loads(line) for line in told.splitlines()]
    assert {"ds4mlx.serve", "ds4mlx.request", "hypercorn.access"} <= {line["logger"] for line in lines}
    request, = [line for line in lines if line["logger"] == "ds4mlx.request"]
    assert (request["request"], request["generated_tokens"]) == (answer.headers["x-request-id"], 7)
    assert request["finish"] == "stop" and "Hello" not in told and "s3cret" not in told


def test_paths_begin_where_it_was_told_to_go(serve, tmp_path):
    process, url = serve("--chdir", tmp_path, "--kv-disk-dir", "kv", "--trace", "trace.txt")
    httpx2.post(f"{url}/v1/chat/completions", json=BODY, trust_env=False, timeout=60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (tmp_path / "kv").is_dir() and "Hello" in (tmp_path / "trace.txt").read_text("utf-8")


def test_every_setting_but_the_seed_of_one_answer_is_an_option(ds4mlx):
    options = {option.replace("-", "_") for option in re.findall(r"--([a-z][a-z-]+)", ds4mlx("serve", "--help").out)}
    hidden = {"ops"}   # for tests of kernels
    assert set(Settings.__slots__) - options == {"seed", "lock"} | hidden and "no_lock" in options


def test_a_place_to_go_that_is_none_is_misuse(ds4mlx):
    refused = ds4mlx("serve", "--chdir", "no/such")
    assert refused.code == 2 and refused.err == ("ds4mlx serve: --chdir no/such: No such file or directory; give a "
                                                 "directory that can be entered\n")
