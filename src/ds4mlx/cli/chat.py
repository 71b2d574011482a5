"""`ds4mlx chat`: a conversation on the terminal. The same path as requests to the server, without the server."""
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.cli.chat_dialogue import Dialogue
    from ds4mlx.cli.chat_input import Lines
    from ds4mlx.cli.chat_screen import AnswerView, Style
    from ds4mlx.cli.interrupt import Interrupt
    from ds4mlx.config import Settings
    from ds4mlx.service.service import Service
    from ds4mlx.service.turn import Turn

MOST_TOKENS = 50000     # of an answer, unless asked otherwise
RED, PLAIN = "\x1b[31m", "\x1b[0m"


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags, add_sampling_flags, add_state_flags, add_thinking_flags
    from ds4mlx.cli.prompt import SYSTEM
    parser = subparsers.add_parser(
        "chat", allow_abbrev=False, help="talk with the model (what ds4mlx does without a command)",
        description="A conversation. Answers go to standard output, everything else to standard error. /help lists the "
                    "commands; Ctrl+C stops an answer, Ctrl+D leaves. Lines that are piped in are messages.")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("-sys", "--system", metavar="TEXT", help=f"system text; empty for none ({SYSTEM})")
    either.add_argument("--system-file", metavar="FILE", help="a file with the system text")
    parser.add_argument("--keep", metavar="NAME", help="go on with the conversation of that name, and keep it there")
    group = parser.add_argument_group("output")
    group.add_argument("--hide-thinking", action="store_true", help="no reasoning (it is shown on a terminal)")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(auto)")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--seed", metavar="N", help="the same seed and messages, the same answers")
    add_thinking_flags(parser)
    add_state_flags(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """0 when the user leaves, 130 when interrupted, 1 when a message of a pipe could not be answered."""
    import asyncio
    import logging

    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = settings_from(args)
    kept = _kept_path(args.keep)
    dialogue = _dialogue(args, settings, kept)
    settings = replace(settings, model=resolve_model(settings))
    with engine_lock(settings, settings.model):
        return asyncio.run(_run(args, settings, dialogue, kept))


def _kept_path(name: str | None) -> Path | None:
    """Raises UsageError for a name that is none."""
    import re

    from ds4mlx.config import state_dir
    from ds4mlx.errors import UsageError
    if name is None:
        return None
    if not re.fullmatch(r"[\w][\w.-]{0,63}", name):
        raise UsageError(f"--keep {name[:80]!r}: need a name of letters, digits, dots and dashes, at most 64")
    return state_dir() / "chats" / f"{name}.json"


def _dialogue(args: Namespace, settings: "Settings", kept: Path | None) -> "Dialogue":
    """The kept conversation, or a new one. Raises UsageError, BadRequest."""
    from ds4mlx.chat.canonical import clean_text
    from ds4mlx.cli.chat_dialogue import Dialogue
    from ds4mlx.cli.prompt import SYSTEM, read_text
    given = read_text(args.system_file).rstrip("\n") if args.system_file is not None else args.system
    dialogue = Dialogue.read(kept) if kept and kept.exists() else Dialogue(SYSTEM)
    if given is not None:
        dialogue.system = clean_text(given)
    if args.think is not None or not dialogue.said:
        dialogue.think = (settings.effort("chat") or "on") if settings.default_thinking else "off"
    return dialogue


async def _run(args: Namespace, settings: "Settings", dialogue: "Dialogue", kept: Path | None) -> int:
    from io import BytesIO

    from ds4mlx.cli.chat_commands import COMMANDS
    from ds4mlx.cli.chat_input import PROMPT, Piped, Terminal
    from ds4mlx.cli.chat_screen import Style
    from ds4mlx.cli.interrupt import Interrupt
    from ds4mlx.config import color_wanted, dumb, state_dir
    interrupt = Interrupt()
    interrupt.listen()
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal and not dumb():
        lines: Lines = Terminal(state_dir() / "history", [f"/{command.name}" for command in COMMANDS])
    else:
        lines = Piped(sys.stdin.buffer if sys.stdin else BytesIO(), PROMPT if terminal else "")
    style = Style(not args.hide_thinking and sys.stdout.isatty(), color_wanted(args.color, sys.stdout.isatty()),
                  color_wanted(args.color, sys.stderr.isatty()))
    chat = Chat(settings, dialogue, kept, interrupt, style)
    await chat.open()
    try:
        if terminal:
            chat.greet()
        return await chat.talk(lines, terminal)
    finally:
        await chat.service.close(0.0)


class Chat:
    """A conversation and the engine that answers in it."""

    def __init__(self, settings: "Settings", dialogue: "Dialogue", kept: Path | None, interrupt: "Interrupt",
                 style: "Style") -> None:
        self.settings, self.dialogue, self._kept, self._interrupt = settings, dialogue, kept, interrupt
        self._style = style
        self._most = MOST_TOKENS if settings.tokens == type(settings)().tokens else settings.tokens
        self.service: "Service"     # once opened
        self._failed = False

    async def open(self) -> None:
        """Load the model. Raises what that raises."""
        from ds4mlx.cli.weights_bar import weights_bar
        from ds4mlx.service.service import open_service
        self.service = open_service(self.settings, weights_bar())
        await self.service.start()

    async def reopen(self, ctx: int) -> None:
        """The same model with another context, or as before if there is no memory for that. Raises DoesNotFit."""
        from ds4mlx.errors import Ds4Error
        before, self.settings = self.settings, replace(self.settings, ctx=ctx)
        await self.service.close(0.0)
        try:
            await self.open()
        except Ds4Error:
            self.settings = before
            await self.open()
            raise

    async def talk(self, lines: "Lines", terminal: bool) -> int:
        """Messages and commands until the user leaves; returns the exit code."""
        from ds4mlx.cli.chat_commands import Leave
        from ds4mlx.cli.interrupt import INTERRUPTED
        while True:
            self._interrupt.rests()
            try:
                line = await lines.next()
                if line is None:
                    break
                self._interrupt.listen()    # the editor of the terminal has taken the signal
                await self._take(line)
            except KeyboardInterrupt:
                if self._interrupt.again():
                    return INTERRUPTED
                self.tell("once more within two seconds to leave, or Ctrl+D")
            except Leave:
                break
        return int(self._failed and not terminal)

    async def _take(self, line: str) -> None:
        from ds4mlx.cli.chat_commands import execute
        from ds4mlx.errors import Ds4Error
        try:
            if line.strip() and not await execute(self, line.strip()):
                await self.say(line)
        except Ds4Error as fault:
            self._failed = True
            self.tell(str(fault), RED)

    async def say(self, text: str) -> None:
        """Ask and show the answer. A question that comes to nothing is taken back. Raises Ds4Error."""
        from ds4mlx.cli.chat_screen import AnswerView
        self.dialogue.ask(text)
        view = AnswerView(self._style)
        try:
            await self._answer(view)
        finally:
            view.close()
            self.dialogue.answer(*view.said)
        self._after(view)

    async def _answer(self, view: "AnswerView") -> None:
        self._interrupt.asks()
        answer = await self.service.run(self._turn())
        self._interrupt.watch(answer)
        async for event in answer:
            view.take(event)

    def _turn(self) -> "Turn":
        from ds4mlx.server.fields import Fields
        from ds4mlx.server.openai_chat import read_chat
        turn = read_chat(Fields(self.dialogue.body(self.settings.seed)), self.service.settings).turn
        return replace(turn, max_tokens=self._most)

    def _after(self, view: "AnswerView") -> None:
        """Figures, how it ended, and the file of a kept conversation. Raises Ds4Error for an answer that failed."""
        from ds4mlx.errors import Ds4Error
        end = view.end
        assert end is not None
        self.tell(view.figures())
        if end.reason == "cancelled":
            self.tell("stopped" if any(view.said) else "stopped before anything was said; the message is taken back")
        elif end.reason == "length":
            self.tell("stopped at the limit: " + (
                f"{self._most} tokens of an answer (-n)" if end.usage.completion_tokens >= self._most else
                f"the context of {self.service.context} tokens is full (/ctx, /reset, /undo)"))
        if self._kept:
            self._kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.dialogue.write(self._kept)
        if end.reason == "error":
            raise Ds4Error(end.error or "the answer failed")

    def greet(self) -> None:
        going_on = f"going on with {len(self.dialogue.said)} messages; " if self.dialogue.said else ""
        name, context = self.service.info.name, self.service.context
        self.tell(f"{name}, context {context} tokens; {going_on}/help lists the commands")

    def tell(self, text: str, style: str = "") -> None:
        """A line for the user on standard error."""
        with suppress(BrokenPipeError):
            print(f"{style}{text}{PLAIN}" if style and self._style.colored_notes else text, file=sys.stderr, flush=True)
