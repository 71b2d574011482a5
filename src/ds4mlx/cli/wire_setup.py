"""What makes each client work with a running server: a wrapper script or the text of its configuration file.

Every value is one that the client was seen to need: without its window it never compacts, without longer time-outs it
drops a prompt that takes minutes to compute.
"""
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from ds4mlx.chat.messages import Json

PATIENCE_S = 3600            # for a client that can be told how long to wait
MOST_OUTPUT_TOKENS = 32000   # of one answer, reasoning included
DUMMY_KEY = "local"          # clients insist on a key where the server needs none
KEY_VARIABLE = "DS4MLX_API_KEY"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running server as a client has to know it. url: without /v1. key: None when it asks for none."""
    url: str
    model: str
    context: int
    most_output: int
    key: str | None = None

    @property
    def output(self) -> int:
        """Tokens to let an answer have: a quarter of the window at most, or a prompt of some length has no room."""
        return min(MOST_OUTPUT_TOKENS, self.most_output, max(1, self.context // 4))

    @property
    def token(self) -> str:
        return self.key or DUMMY_KEY


@dataclass(frozen=True, slots=True)
class Client:
    """head_s, silence_s: what it waits for the head of an answer and between events, None without limit; `told` where
    the setup raises them. counts_comments: a comment in a stream is a sign of life to it."""
    name: str
    path: str               # of the API that it speaks
    setup: Callable[[Endpoint], str]
    place: str              # where the text belongs
    first_prompt: int       # tokens of its own texts and tools, about
    head_s: float | None
    silence_s: float
    told: bool
    counts_comments: bool = True


def claude(server: Endpoint) -> str:
    """A script to be called instead of `claude`."""
    patience_ms = str(1000 * PATIENCE_S)
    exports = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.token,
        **{name: server.model for name in ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
                                           "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                                           "CLAUDE_CODE_SUBAGENT_MODEL")},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",   # a text at the very start of the prompt that changes with each
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": patience_ms,
        "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": patience_ms,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": patience_ms,
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    return "\n".join(["#!/bin/sh", f"# Claude Code on the ds4mlx server at {server.url}", "unset ANTHROPIC_API_KEY",
                      *lines,
                      "# With this flag, what depends on the directory stands behind the tools, so that projects share",
                      "# the prompt before it.",
                      'exec claude --exclude-dynamic-system-prompt-sections "$@"']) + "\n"


def codex(server: Endpoint) -> str:
    """TOML; the first three keys have to stand above all tables of the file."""
    quoted = {name: json.dumps(value) for name, value in (("model", server.model), ("url", f"{server.url}/v1"))}
    return f"""\
model = {quoted["model"]}
model_provider = "ds4mlx"
model_context_window = {server.context}

[model_providers.ds4mlx]
name = "ds4mlx"
base_url = {quoted["url"]}
env_key = "{KEY_VARIABLE}"
wire_api = "responses"
stream_idle_timeout_ms = {1000 * PATIENCE_S}
"""


def opencode(server: Endpoint) -> str:
    """JSON. `small_model` too: titles are asked of it, and another provider's would be asked elsewhere."""
    model: Json = {"name": server.model, "limit": {"context": server.context, "output": server.output},
                   "tool_call": True, "reasoning": True}
    return _json({
        "$schema": "https://opencode.ai/config.json",
        "provider": {"ds4mlx": {"npm": "@ai-sdk/openai-compatible", "name": "ds4mlx",
                                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.token},
                                "models": {server.model: model}}},
        "model": f"ds4mlx/{server.model}", "small_model": f"ds4mlx/{server.model}"})


def pi(server: Endpoint) -> str:
    """JSON."""
    model: Json = {"id": server.model, "contextWindow": server.context, "maxTokens": server.output, "reasoning": True}
    return _json({"providers": {"ds4mlx": {"baseUrl": f"{server.url}/v1", "api": "openai-completions",
                                           "apiKey": server.token, "models": [model]}}})


def _json(value: Json) -> str:
    return json.dumps(value, indent=2) + "\n"


CLIENTS = {client.name: client for client in (
    Client("claude", "/v1/messages", claude, "an executable file in your PATH, as claude-ds4mlx; call that", 13600,
           head_s=PATIENCE_S, silence_s=PATIENCE_S, told=True),
    Client("codex", "/v1/responses", codex,
           f"~/.codex/config.toml, the first three lines at its top; then export {KEY_VARIABLE}={DUMMY_KEY}, or the "
           "server's key", 9700, head_s=None, silence_s=PATIENCE_S, told=True, counts_comments=False),
    Client("opencode", "/v1/chat/completions", opencode,
           "~/.config/opencode/opencode.json, or opencode.json in a project", 7700, head_s=300, silence_s=300,
           told=False),
    Client("pi", "/v1/chat/completions", pi,
           "~/.pi/agent/models.json; then pi --provider ds4mlx --model deepseek-v4-flash", 1300, head_s=300,
           silence_s=300, told=False),
)}
