"""`ds4mlx wire`: what it prints is what the client needs, and its check finds what is wrong with a server."""
import json
import os
import shlex
import subprocess
import tomllib
from dataclasses import replace

import pytest
from server.conftest import serve, start_server, tokenizer  # noqa: F401  (fixtures of the server's tests)

from ds4mlx.cli.wire import NAMES, base_url
from ds4mlx.cli.wire_setup import CLIENTS
from ds4mlx.cli.wire_turns import TURNS, WORD
from ds4mlx.errors import UsageError
from ds4mlx.server.app import ROUTES

REGISTERED = [name for name in NAMES if CLIENTS[name].path in {route.path for route in ROUTES}]


def block(tool, argument):
    return (f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{tool}">\n<｜DSML｜parameter name="{argument}" string="true">'
            f'echo {WORD}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')


@pytest.fixture
def agent(serve, tokenizer):
    """agent(client, answers): a server whose model gives one answer after another; by default a call, then text."""
    def start(client, answers=None, **settings):
        argument = "cmd" if client == "codex" else "command"
        left = iter(answers or (f"plan</think>I run it.\n\n{block(TURNS[client].tool, argument)}",
                                f"seen</think>It printed {WORD}."))

        def script(prompt):
            return tokenizer.encode_marked(next(left)) if len(prompt) > 1 else []   # not for the warm-up
        return serve(script=script, settings={"ctx": 16384, **settings})
    return start


@pytest.mark.parametrize("client", REGISTERED)
def test_a_sound_server_passes_the_check_of_each_client(ds4mlx, agent, client):
    result = ds4mlx("wire", client, "--check", "--url", agent(client).url)
    assert result.code == 0, result.out
    lines = result.out.splitlines()
    assert lines[0].startswith(f"{client}: POST {CLIENTS[client].path} at http://127.0.0.1:")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["ok    tool round trip", "ok    cache hit",
                                                                   "ok    time-outs"]


@pytest.mark.parametrize("client", REGISTERED)
def test_the_second_request_goes_on_from_the_end_of_the_first_answer(ds4mlx, agent, client):
    server = agent(client)
    ds4mlx("wire", client, "--check", "--url", server.url)
    counts = server.service.metrics.counts
    assert sum(counts.requests.values()) == 2 and counts.prompt_tokens["prefill"] < 1.3 * len(
        server.service.scheduler.slots[0].session.tokens)
    assert {"chat-tool-output", "anthropic-tool-output", "responses-tool-output", "responses-visible"} & set(
        counts.sources)


@pytest.mark.parametrize("client", REGISTERED)
def test_a_model_that_does_not_call_fails_the_check(ds4mlx, agent, client):
    result = ds4mlx("wire", client, "--check", "--url", agent(client, ["hm</think>No."]).url)
    assert result.code == 1 and f"FAIL  tool round trip: the model answered without calling {TURNS[client].tool}" in (
        result.out)


@pytest.mark.parametrize("client", REGISTERED)
def test_a_failing_engine_fails_the_check_with_its_message(ds4mlx, agent, client):
    server = agent(client)
    server.stub.before_decode = lambda: 1 / 0
    result = ds4mlx("wire", client, "--check", "--url", server.url)
    assert result.code == 1 and "FAIL  tool round trip: the stream ended in " in result.out
    assert "see the server's log" in result.out


def test_an_error_before_the_stream_is_told(ds4mlx, agent):
    result = ds4mlx("wire", "pi", "--check", "--url", agent("pi", ctx=200).url)
    assert result.code == 1 and "POST /v1/chat/completions answers 400: prompt is " in result.out


def test_a_route_that_is_not_there_is_reported(ds4mlx, agent, monkeypatch):
    server = agent("codex")
    monkeypatch.setitem(CLIENTS, "codex", replace(CLIENTS["codex"], path="/v9/responses"))
    checked, printed = (ds4mlx("wire", "codex", "--url", server.url, *more) for more in (["--check"], []))
    assert checked.code == 1 and "POST /v9/responses is not registered on this server yet" in checked.out
    assert printed.code == 0 and "not registered" in printed.err


def test_a_cache_that_is_lost_between_the_requests_is_found(ds4mlx, agent):
    server = agent("pi")
    decoded, failed = [], []
    server.stub.before_decode = lambda: decoded.append(1)

    def fail_once():   # at the first slice after the answer, which would keep its end
        if decoded and not failed:
            failed.append(1)
            raise ArithmeticError
    server.stub.before_prefill = fail_once
    result = ds4mlx("wire", "pi", "--check", "--url", server.url)
    assert result.code == 1 and "FAIL  cache hit: request 2 reused 0 of " in result.out


def test_the_wrapper_of_claude_sets_what_the_client_needs(ds4mlx, agent, tmp_path):
    server = agent("claude")
    script = ds4mlx("wire", "claude", "--url", server.url).out
    (tmp_path / "claude").write_text('#!/bin/sh\nenv\necho "arguments: $*"\n')
    (tmp_path / "claude").chmod(0o755)
    ran = subprocess.run(["sh", "-c", script, "wrapper", "-p", "two words"], capture_output=True, text=True, timeout=60,
                         env={"PATH": f"{tmp_path}:/usr/bin:/bin", "ANTHROPIC_API_KEY": "secret"})
    seen = dict(line.split("=", 1) for line in ran.stdout.splitlines() if "=" in line)
    assert (seen["ANTHROPIC_BASE_URL"], seen["ANTHROPIC_AUTH_TOKEN"]) == (server.url, "local")
    assert {value for name, value in seen.items() if name.endswith("_MODEL")} == {"deepseek-v4-flash"}
    assert (seen["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], seen["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("16384", "4096")
    assert seen["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0" and "ANTHROPIC_API_KEY" not in seen
    assert {int(value) for name, value in seen.items() if "TIMEOUT_MS" in name} == {3_600_000}
    assert "arguments: --exclude-dynamic-system-prompt-sections -p two words" in ran.stdout


def test_the_table_of_codex_is_toml(ds4mlx, agent):
    server = agent("codex")
    table = tomllib.loads(ds4mlx("wire", "codex", "--url", server.url).out)
    provider = table["model_providers"][table["model_provider"]]
    assert (table["model"], table["model_context_window"]) == ("deepseek-v4-flash", 16384)
    assert (provider["base_url"], provider["wire_api"]) == (f"{server.url}/v1", "responses")
    assert provider["stream_idle_timeout_ms"] == 3_600_000 and provider["env_key"] == "DS4MLX_API_KEY"


def test_the_files_of_opencode_and_pi_are_json_with_the_window(ds4mlx, agent):
    server = agent("pi")
    opencode, pi = (json.loads(ds4mlx("wire", name, "--url", server.url).out) for name in ("opencode", "pi"))
    provider = opencode["provider"]["ds4mlx"]
    assert opencode["model"] == opencode["small_model"] == "ds4mlx/deepseek-v4-flash"
    assert provider["models"]["deepseek-v4-flash"]["limit"] == {"context": 16384, "output": 4096}
    model, = pi["providers"]["ds4mlx"]["models"]
    assert (model["contextWindow"], model["maxTokens"]) == (16384, 4096)
    assert provider["options"]["baseURL"] == pi["providers"]["ds4mlx"]["baseUrl"] == f"{server.url}/v1"


@pytest.mark.parametrize("client", NAMES)
def test_no_file_is_changed(ds4mlx, agent, tmp_path, monkeypatch, client):
    monkeypatch.setenv("HOME", str(tmp_path))
    result = ds4mlx("wire", client, "--url", agent(client).url)
    assert result.code == 0 and result.err.startswith("belongs into ") and os.listdir(tmp_path) == []


def test_a_key_goes_where_the_client_sends_it_from(ds4mlx, agent, monkeypatch):
    server, key = agent("claude", api_key="it's $me"), "it's $me"
    refused = ds4mlx("wire", "claude", "--url", server.url)
    assert refused.code == 1 and "answers 401" in refused.err and refused.out == ""
    monkeypatch.setenv("DS4MLX_API_KEY", key)
    assert f"ANTHROPIC_AUTH_TOKEN={shlex.quote(key)}" in ds4mlx("wire", "claude", "--url", server.url).out
    assert json.loads(ds4mlx("wire", "pi", "--url", server.url).out)["providers"]["ds4mlx"]["apiKey"] == key


def test_a_context_that_is_too_small_for_the_client_is_warned_of(ds4mlx, agent):
    assert "larger --ctx" in ds4mlx("wire", "claude", "--url", agent("claude").url).err
    assert "larger --ctx" not in ds4mlx("wire", "claude", "--url", agent("claude", ctx=65536).url).err


def test_without_a_server_nothing_is_printed(ds4mlx):
    result = ds4mlx("wire", "pi", "--url", "http://127.0.0.1:9")
    assert (result.code, result.out) == (1, "") and "start ds4mlx serve" in result.err


def test_the_address_is_that_of_the_servers_own_settings(ds4mlx, agent, tmp_path):
    server = agent("pi")
    (tmp_path / "ds4mlx.toml").write_text(f'[serve]\nhost = "0.0.0.0"\nport = {server.url.rsplit(":", 1)[1]}\n')
    printed = json.loads(ds4mlx("wire", "pi", "--config", tmp_path / "ds4mlx.toml").out)
    assert printed["providers"]["ds4mlx"]["baseUrl"] == f"{server.url}/v1"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_end_as_clients_write_it(url):
    assert base_url(url) == "http://h:1"


@pytest.mark.parametrize("client", [[], ["cursor"]])
def test_a_client_has_to_be_named(ds4mlx, client):
    result = ds4mlx("wire", *client)
    assert result.code == 2 and all(name in result.err for name in NAMES)


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "unix:/tmp/s"])
def test_other_addresses_are_misuse(ds4mlx, url):
    with pytest.raises(UsageError):
        base_url(url)
    assert ds4mlx("wire", "pi", "--url", url).code == 2


def test_every_client_has_a_setup_and_a_task():
    assert tuple(CLIENTS) == tuple(TURNS) == NAMES
