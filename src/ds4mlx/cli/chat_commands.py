"""The commands of a chat: what may be typed instead of a message."""
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ds4mlx.cli.tables import aligned, size
from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from ds4mlx.cli.chat_dialogue import Dialogue, Think
    from ds4mlx.config import Settings
    from ds4mlx.service.service import Service

_COMMAND = re.compile(r"/([a-z-]+)(?:\s+(.*))?\Z", re.DOTALL)


class Leave(Exception):
    """The user is done."""


class Chatting(Protocol):
    """What commands work on."""
    dialogue: "Dialogue"
    settings: "Settings"
    service: "Service"

    def tell(self, text: str) -> None: ...          # a line for the user, not of the model
    async def say(self, text: str) -> None: ...     # a message, and its answer
    async def reopen(self, ctx: int) -> None: ...   # the engine, with another context


@dataclass(frozen=True, slots=True)
class Command:
    """`argument` names what may follow; in brackets, what need not."""
    name: str
    argument: str
    about: str
    run: Callable[[Chatting, str], Awaitable[None]]


async def execute(chat: Chatting, line: str) -> bool:
    """Whether the line was a command; then it was carried out. Raises UsageError, Leave."""
    found = _COMMAND.match(line)
    if not found:
        return False
    name, argument = found[1], (found[2] or "").strip()
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        near = get_close_matches(name, [command.name for command in COMMANDS], 1)
        raise UsageError(f"no command /{name}{f', did you mean /{near[0]}?' if near else ';'} /help lists them")
    if argument and not command.argument:
        raise UsageError(f"/{name} takes nothing, got {argument[:40]!r}")
    if not argument and command.argument and not command.argument.startswith("["):
        raise UsageError(f"/{name} needs {command.argument}")
    await command.run(chat, argument)
    return True


async def _help(chat: Chatting, _: str) -> None:
    rows = [[f"/{command.name} {command.argument}".rstrip(), command.about] for command in COMMANDS]
    rows += [["Ctrl+C", "stop an answer and keep what there is of it; twice: leave"],
             ["\\ and Enter", "the message goes on; so does a paste of several lines"]]
    for line in aligned(rows, right=False):
        chat.tell(line)


def _thinks(level: "Think") -> Callable[[Chatting, str], Awaitable[None]]:
    async def run(chat: Chatting, argument: str) -> None:
        if argument not in ("", "low", "high", "max"):
            raise UsageError(f"/think {argument[:40]}: need low, high or max, or nothing")
        before, chat.dialogue.think = chat.dialogue.think, argument or level
        rebuilt = chat.dialogue.said and {before, chat.dialogue.think} & {"low", "high", "max"}
        chat.tell(f"thinking: {chat.dialogue.think}" + (
            "; the effort stands at the very beginning, so the conversation is computed again" if rebuilt else ""))
    return run


async def _ctx(chat: Chatting, argument: str) -> None:
    ctx = _setting("ctx", argument)
    await chat.reopen(ctx)
    chat.tell(f"context: {chat.service.context} tokens" + (
        "; the conversation is computed again with your next message" if chat.dialogue.said else ""))


async def _power(chat: Chatting, argument: str) -> None:
    power = chat.service.scheduler.power = _setting("power", argument)
    chat.tell(f"power: {power} %")


def _setting(name: str, value: str) -> int:
    from ds4mlx.config import Settings
    return getattr(Settings.load("chat", {name: value}, {}), name)


async def _read(chat: Chatting, argument: str) -> None:
    from ds4mlx.cli.prompt import read_text
    await chat.say(read_text(str(Path(argument).expanduser())))


async def _system(chat: Chatting, argument: str) -> None:
    chat.dialogue.system = argument
    chat.tell("the system text is replaced" if argument else "no system text")


async def _reset(chat: Chatting, _: str) -> None:
    chat.dialogue.said.clear()
    chat.tell("the conversation is forgotten")


async def _undo(chat: Chatting, _: str) -> None:
    question = chat.dialogue.undo()
    if question is None:
        raise UsageError("/undo: nothing has been said")
    chat.tell(f"forgotten: {question.splitlines()[0][:60] if question.strip() else '(empty)'}")


async def _retry(chat: Chatting, _: str) -> None:
    question = chat.dialogue.undo()
    if question is None:
        raise UsageError("/retry: nothing has been asked")
    await chat.say(question)


async def _save(chat: Chatting, argument: str) -> None:
    path = Path(argument).expanduser()
    chat.dialogue.write(path)
    chat.tell(f"saved {path}")


async def _load(chat: Chatting, argument: str) -> None:
    from ds4mlx.cli.chat_dialogue import Dialogue
    path = Path(argument).expanduser()
    loaded = Dialogue.read(path)
    loaded.asked = chat.dialogue.asked
    chat.dialogue = loaded
    chat.tell(f"loaded {path}: {len(loaded.said)} messages")


async def _stats(chat: Chatting, _: str) -> None:
    service, said = chat.service, chat.dialogue.said
    plan, counts = service.scheduler.plan, service.metrics.counts
    computed, prompt = counts.prompt_tokens["prefill"], sum(counts.prompt_tokens.values())
    rows = [
        ["messages", f"{len(said)}, thinking {chat.dialogue.think}"],
        ["tokens", f"{prompt:,} of prompts, {computed:,} of them computed; {counts.generated_tokens:,} generated, "
                   f"{counts.reasoning_tokens:,} of them reasoning"],
        ["speed", f"prefill {counts.prefill_tps:.1f} t/s, generation {counts.decode_tps:.1f} t/s, the last time"],
        ["context", f"{service.context:,} tokens"],
        ["memory", f"weights {size(plan.weights_bytes)}, state {size(plan.session_bytes)}"],
        ["model", f"{service.info.name}, {service.info.backend}, {chat.settings.model}"]]
    for line in aligned(rows, right=False):
        chat.tell(line)


async def _quit(chat: Chatting, _: str) -> None:
    raise Leave


COMMANDS = (
    Command("help", "", "these commands", _help),
    Command("think", "[low|high|max]", "reason before answering, that hard", _thinks("on")),
    Command("think-max", "", "/think max", _thinks("max")),
    Command("nothink", "", "answer at once", _thinks("off")),
    Command("ctx", "N", "another context size, in tokens", _ctx),
    Command("power", "N", "duty cycle in percent, to keep a machine cool", _power),
    Command("read", "FILE", "send a file as the next message", _read),
    Command("system", "[TEXT]", "replace the system text", _system),
    Command("reset", "", "forget the conversation", _reset),
    Command("undo", "", "forget the last question and its answer", _undo),
    Command("retry", "", "answer the last question anew", _retry),
    Command("save", "FILE", "write the conversation to a file", _save),
    Command("load", "FILE", "go on with a conversation from a file", _load),
    Command("stats", "", "tokens, speed and memory", _stats),
    Command("quit", "", "leave", _quit),
    Command("exit", "", "leave", _quit),
)
