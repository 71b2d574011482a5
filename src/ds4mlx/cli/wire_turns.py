"""One scripted task in the words of each client: a request that asks for a tool call, and one with its result.

Bodies have the shape that the client was seen to send; answers are read as strictly as it reads them.
"""
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ds4mlx.chat.messages import Json
from ds4mlx.errors import Ds4Error

Body = dict[str, Json]

WORD = "wired"
COMMAND = f"echo {WORD}"
SYSTEM = ("You are a coding agent on a user's own machine, and this is a test of the connection between you and the "
          "program that runs your tools. Use the tool that you are given whenever you are asked to run a command: call "
          "it once, wait for its result, and then say in one short sentence what the result was. Do not guess what a "
          "command prints, do not run other commands than the one that the user asks for, and do not ask questions.")
QUESTION = f"Run the command `{COMMAND}` with your tool, then tell me what it printed."
ANSWER_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as a client understands it. echo: what it sends back of it. ended: with the event that must come."""
    calls: list[Call] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    echo: list[Json] = field(default_factory=list)
    ended: bool = False


class Turns(Protocol):
    """A client's side of the task."""
    tool: str

    def headers(self) -> dict[str, str]: ...
    def query(self) -> str: ...
    def first(self, model: str) -> Body: ...
    def reply(self, events: Sequence[Json]) -> Reply: ...  # raises Ds4Error for an error event
    def second(self, body: Body, reply: Reply, result: str) -> Body: ...


def _schema(argument: str) -> Json:
    return {"type": "object", "properties": {argument: {"type": "string", "description": "The command to run"}},
            "required": [argument], "additionalProperties": False}


class ClaudeTurns:
    """Claude Code on /v1/messages."""
    tool = "Bash"

    def headers(self) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14",
                "x-app": "cli", "x-claude-code-session-id": "wire-check"}

    def query(self) -> str:
        return "?beta=true"

    def first(self, model: str) -> Body:
        mark: Json = {"type": "ephemeral"}
        return {"model": model, "max_tokens": ANSWER_TOKENS, "stream": True,
                "system": [{"type": "text", "text": SYSTEM, "cache_control": mark}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": mark}]}],
                "tools": [{"name": self.tool, "description": "Runs a shell command.",
                           "input_schema": _schema("command")}],
                "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "low"},
                "metadata": {"user_id": "wire-check"}}

    def reply(self, events: Sequence[Json]) -> Reply:
        blocks: dict[int, Body] = {}
        usage: Body = {}
        fragments: dict[int, str] = {}
        for event in events:
            match event:
                case {"type": "error", "error": error}:
                    raise Ds4Error(f"the stream ended in an error: {error}")
                case {"type": "message_start", "message": message}:
                    usage |= message["usage"]
                case {"type": "message_delta", "usage": more}:
                    usage |= more
                case {"type": "content_block_start", "index": index, "content_block": block}:
                    blocks[index] = dict(block)
                case {"type": "content_block_delta", "index": index, "delta": {"type": "input_json_delta", **delta}}:
                    fragments[index] = fragments.get(index, "") + delta["partial_json"]
                case {"type": "content_block_delta", "index": index, "delta": {"type": _, **delta}}:
                    for member, text in delta.items():
                        blocks[index][member] = blocks[index].get(member, "") + text
        calls = [Call(block["id"], block["name"], fragments.get(index, "{}")) for index, block in blocks.items()
                 if block["type"] == "tool_use"]
        for index, text in fragments.items():
            blocks[index]["input"] = json.loads(text)
        read = usage.get("cache_read_input_tokens", 0)
        return Reply(calls, "".join(block["text"] for block in blocks.values() if block["type"] == "text"),
                     usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0) + read, read,
                     list(blocks.values()), ended=any(event == {"type": "message_stop"} for event in events))

    def second(self, body: Body, reply: Reply, result: str) -> Body:
        results: list[Json] = [{"type": "tool_result", "tool_use_id": call.id, "content": result, "is_error": False}
                               for call in reply.calls]
        return body | {"messages": [*body["messages"], {"role": "assistant", "content": reply.echo},
                                    {"role": "user", "content": results}]}


class ChatTurns:
    """/v1/chat/completions, as opencode or as Pi asks."""
    tool = "bash"

    def __init__(self, pi: bool) -> None:
        self.pi = pi

    def headers(self) -> dict[str, str]:
        return {} if self.pi else {"x-session-id": "wire-check", "x-session-affinity": "wire-check"}

    def query(self) -> str:
        return ""

    def first(self, model: str) -> Body:
        asked: Json = [{"type": "text", "text": QUESTION}] if self.pi else f'"{QUESTION}"'
        own: Body = ({"store": False, "max_completion_tokens": ANSWER_TOKENS, "reasoning_effort": "medium"} if self.pi
                     else {"max_tokens": ANSWER_TOKENS, "tool_choice": "auto"})
        return {"model": model, "stream": True, "stream_options": {"include_usage": True}, **own,
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}],
                "tools": [{"type": "function", "function": {"name": self.tool, "description": "Runs a shell command.",
                                                            "parameters": _schema("command")}}]}

    def reply(self, events: Sequence[Json]) -> Reply:
        calls: dict[int, list[str]] = {}
        said = {"content": "", "reasoning_content": ""}
        finish, usage = None, {}
        for event in (event for event in events if isinstance(event, dict)):
            if "error" in event:
                raise Ds4Error(f"the stream ended in an error: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                for member in said:
                    said[member] += choice["delta"].get(member) or ""
                for part in choice["delta"].get("tool_calls", ()):
                    function = part["function"]
                    known = calls.setdefault(part["index"], [part.get("id", ""), function.get("name", ""), ""])
                    known[2] += function.get("arguments", "")
        made = [Call(*calls[index]) for index in sorted(calls)]
        details = usage.get("prompt_tokens_details") or {}
        return Reply(made, said["content"], usage.get("prompt_tokens", 0), details.get("cached_tokens", 0),
                     [self._echo(said, made)], ended=finish is not None and events[-1] == "[DONE]")

    def _echo(self, said: dict[str, str], calls: Sequence[Call]) -> Json:
        empty = None if self.pi else ""
        return {"role": "assistant", "content": said["content"] or empty,
                "reasoning_content": said["reasoning_content"],
                "tool_calls": [{"id": call.id, "type": "function",
                                "function": {"name": call.name, "arguments": _compact(call.arguments)}}
                               for call in calls]}

    def second(self, body: Body, reply: Reply, result: str) -> Body:
        results: list[Json] = [{"role": "tool", "tool_call_id": call.id, "content": result} for call in reply.calls]
        return body | {"messages": [*body["messages"], *reply.echo, *results]}


class CodexTurns:
    """Codex on /v1/responses."""
    tool = "exec_command"

    def headers(self) -> dict[str, str]:
        return {"accept": "text/event-stream", "originator": "codex_exec", "session-id": "wire-check"}

    def query(self) -> str:
        return ""

    def first(self, model: str) -> Body:
        def message(role: str, text: str) -> Json:
            return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

        return {"model": model, "stream": True, "store": False, "parallel_tool_calls": True, "tool_choice": "auto",
                "input": [message("developer", SYSTEM), message("user", QUESTION)],
                "tools": [{"type": "function", "name": self.tool, "description": "Runs a shell command.",
                           "strict": False, "parameters": _schema("cmd")}, {"type": "web_search"}],
                "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "wire-check"}

    def reply(self, events: Sequence[Json]) -> Reply:
        items: list[Json] = []
        usage: Body = {}
        ended = False
        for event in events:
            match event:
                case {"type": "response.output_item.done", "item": item}:
                    items.append(item)
                case {"type": "response.completed", "response": response}:
                    usage, ended = response["usage"], True
                case {"type": "response.failed" | "response.incomplete", "response": response}:
                    raise Ds4Error(f"the stream ended in {response['status']}: "
                                   f"{response['error'] or response['incomplete_details']}")
        calls = [Call(item["call_id"], item["name"], item["arguments"]) for item in items
                 if item["type"] == "function_call"]
        text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        details = usage.get("input_tokens_details") or {}
        return Reply(calls, text, usage.get("input_tokens", 0), details.get("cached_tokens", 0), items, ended)

    def second(self, body: Body, reply: Reply, result: str) -> Body:
        results: list[Json] = [{"type": "function_call_output", "call_id": call.id, "output": result}
                               for call in reply.calls]
        return body | {"input": [*body["input"], *reply.echo, *results]}


def _compact(arguments: str) -> str:
    """As a client that has parsed them writes them again."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return arguments


TURNS: dict[str, Turns] = {"claude": ClaudeTurns(), "codex": CodexTurns(), "opencode": ChatTurns(pi=False),
                           "pi": ChatTurns(pi=True)}
