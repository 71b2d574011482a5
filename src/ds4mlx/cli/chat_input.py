"""Where the lines of a chat come from: a terminal with editing and history, or a pipe, line by line.

The prompt and all that is typed go to standard error: standard output is the model's alone.
"""
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, MORE = "ds4mlx> ", "      > "
MOST_ENTRIES = 512


class Lines(Protocol):
    """Messages as a user gives them."""

    async def next(self) -> str | None:
        """The next message, None at the end. Raises KeyboardInterrupt when the user gives one up."""


class Piped:
    """Lines of a file or pipe, or of a terminal that can do no more; a backslash at the end of one joins the next."""

    def __init__(self, stream: BinaryIO, prompt: str = "") -> None:
        self._stream, self._prompt = stream, prompt

    async def next(self) -> str | None:
        import asyncio
        print(self._prompt, end="", file=sys.stderr, flush=True)
        line = await asyncio.to_thread(self._message)   # Ctrl+C is heard while it waits
        return None if line is None else decoded(line)

    def _message(self) -> bytes | None:
        parts: list[bytes] = []
        while line := self._stream.readline():
            line = line.rstrip(b"\r\n")
            if not line.endswith(b"\\"):
                return b"\n".join([*parts, line])
            parts.append(line[:-1])
        return b"\n".join(parts) if parts else None


def decoded(raw: bytes) -> str:
    """Text of a line; bytes that are not UTF-8 become U+FFFD, and standard error says so."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        print(f"ds4mlx chat: byte {fault.start + 1} of this message is not UTF-8; such bytes are read as U+FFFD",
              file=sys.stderr)
        return raw.decode("utf-8", "replace")


class Terminal:
    """A line editor with history, completion of commands, and pastes that stay one message."""

    def __init__(self, history: Path, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output
        words = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=_kept(history), completer=words, complete_while_typing=False, multiline=True,
            key_bindings=_bindings(), output=create_output(stdout=sys.stderr),
            prompt_continuation=lambda width, number, wrapped: MORE, enable_history_search=True)

    async def next(self) -> str | None:
        from ds4mlx.chat.canonical import clean_text
        try:
            return clean_text(await self._session.prompt_async(PROMPT))   # bytes of no character are surrogates
        except EOFError:
            return None


def _bindings() -> "KeyBindings":
    """Enter ends a message, unless a backslash stands before it; Alt+Enter is a new line."""
    from prompt_toolkit.key_binding import KeyBindings
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: "KeyPressEvent") -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and not buffer.document.current_line_after_cursor:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


def _kept(path: Path) -> "History":
    """The history of a file, or one that is forgotten where there can be no file."""
    from prompt_toolkit.history import History, InMemoryHistory
    try:
        entries = read_history(path)
    except OSError as fault:
        print(f"ds4mlx chat: {path}: {fault.strerror}; nothing typed is remembered. Set DS4MLX_HOME to a directory of "
              "yours", file=sys.stderr)
        return InMemoryHistory()

    class Kept(History):
        def load_history_strings(self) -> Iterable[str]:
            return reversed(entries)

        def store_string(self, string: str) -> None:
            write_entry(path, string)

    return Kept()


def read_history(path: Path) -> list[str]:
    """Entries, oldest first: each a JSON text on its line. A file that grew too long is cut. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    lines = path.read_bytes().splitlines()
    if len(lines) > MOST_ENTRIES:
        lines = lines[-MOST_ENTRIES:]
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"\n".join(lines) + b"\n")
        os.replace(partial, path)
    return [entry for line in lines if isinstance(entry := _entry(line), str)]


def write_entry(path: Path, text: str) -> None:
    """One more entry, in one write, so that two chats may share the file. A full disk costs the entry alone."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
            file.write(json.dumps(text).encode() + b"\n")
    except OSError as fault:
        print(f"ds4mlx chat: {path}: {fault.strerror}; this line is not remembered", file=sys.stderr)


def _entry(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None     # half of one, of a disk that was full
