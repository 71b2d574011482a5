"""How four agents send a conversation back, as their requests are once they have been read.

Each begins with its own system text and tools, and echoes an assistant's turn in its own way.
"""
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from host import system, talk, user, without_reasoning

from ds4mlx.chat.messages import Message, TextPart, Tool, ToolCall, ToolResult

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"},
                                           "background": {"type": "boolean", "default": False}}}
BLOCK = ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n'
         '<｜DSML｜parameter name="timeout" string="false">5000.0</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="command" string="true">ls  \ncat &quot;a&quot; {0}</｜DSML｜parameter>\n'
         '</｜DSML｜invoke>\n\n</｜DSML｜tool_calls>')   # with a blank line and order that no renderer writes
MAIN = "Be brief, be exact, and do not guess. " * 40


def call(number=0):
    """A sampled block of calls."""
    return BLOCK.replace("{0}", str(number))


def bash():
    return Tool("bash", {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA})


@dataclass(frozen=True)
class Client:
    """opening(prompt, nonce, status): the first request's messages. arguments: as the client sends them back."""
    name: str
    api: str
    opening: Callable[..., tuple[Message, ...]]
    arguments: Callable[[str], str]
    result_role: str = "tool"

    def echo(self, message, keeps_reasoning):
        """An answer as the next request holds it."""
        kept = message if keeps_reasoning else without_reasoning(message)
        parts = (replace(part, arguments=self.arguments(part.arguments)) if isinstance(part, ToolCall) else part
                 for part in kept.parts)
        return replace(kept, parts=tuple(parts))

    def results(self, message, text):
        return Message(self.result_role, tuple(ToolResult(part.id, text) for part in message.parts
                                               if isinstance(part, ToolCall)))

    def conversation(self, *messages):
        return talk(*messages, tools=(bash(),))


def _claude_code(prompt, nonce=1, status="clean"):
    return (system(f"x-anthropic-billing-header: cc_version=2.1.{nonce};\n", "You are an agent.\n", MAIN),
            Message("user", (TextPart(f"<system-reminder>git status: {status}</system-reminder>"), TextPart(prompt))),
            system("Agents and skills. " * 30))


def _codex(prompt, nonce=1, status="clean"):
    return (system(MAIN), system("Permissions. ", "Skills."), user(f"<environment>{status}</environment>"),
            user(prompt))


def _opencode(prompt, nonce=1, status="clean"):
    return (system(MAIN + f"\nDirectory: /project\nGit: {status}"), user(f'"{prompt}"'))


def _pi(prompt, nonce=1, status="clean"):
    return (system(MAIN + "\nCurrent directory: /project"), user(prompt))


def _normalised(arguments):
    """Keys in the schema's order, defaults added, numbers and ends of lines rewritten."""
    given = json.loads(arguments)
    lines = "\n".join(line.rstrip() for line in given["command"].split("\n"))
    return json.dumps({"command": lines, "timeout": int(given["timeout"]), "background": False})


def _compact(arguments):
    return json.dumps(json.loads(arguments), separators=(",", ":"))


CLIENTS = [Client("claude-code", "anthropic", _claude_code, _normalised, "user"),
           Client("codex", "responses", _codex, str), Client("opencode", "chat", _opencode, _compact),
           Client("pi", "chat", _pi, _compact)]
