"""What a command line asks: its text or its messages, as the body of a chat request or as the ids of a prompt."""
import os
import stat
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.errors import BadRequest, UsageError

if TYPE_CHECKING:
    from ds4mlx.chat.messages import Json
    from ds4mlx.config import Settings
    from ds4mlx.text.tokenizer import Tokenizer

SYSTEM = "You are a helpful assistant"
MAX_BYTES = 64 << 20


def add_prompt_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the question")
    group.add_argument("--prompt-file", metavar="FILE", help="a file with the question; - reads standard input")
    either = group.add_mutually_exclusive_group()
    either.add_argument("-sys", "--system", metavar="TEXT", help=f"system text; empty for none ({SYSTEM})")
    either.add_argument("--raw-prompt", action="store_true",
                        help="the text is the whole prompt: BOS, then its tokens, no markup")


def question(args: Namespace, *others: str) -> str | None:
    """The prompt's text, or None when one of the `others` gives the prompt. Raises UsageError unless one is given."""
    names = ("prompt", "prompt_file", *others)
    given = [name for name in names if getattr(args, name) is not None]
    if len(given) != 1:
        spelled = ", ".join(name.upper() if name == "file" else "--" + name.replace("_", "-") for name in names)
        raise UsageError(f"{'nothing is asked' if not given else 'the prompt is given twice'}; need one of {spelled}")
    if given == ["prompt"]:
        from ds4mlx.chat.canonical import clean_text
        return clean_text(args.prompt)
    return read_text(getattr(args, given[0])) if given[0] in ("prompt_file", "file") else None


def read_text(name: str) -> str:
    """A UTF-8 file, or standard input for "-". Raises BadRequest."""
    raw = read_bytes(name)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise BadRequest(f"{name}: byte {fault.start} is not UTF-8; convert the file first") from fault


def piped_text() -> str:
    """What a pipe or a file on standard input holds; "" from a terminal, a device or nothing. Raises BadRequest."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):   # closed, or not a file of the system
        return ""
    return read_text("-").rstrip("\n") if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def read_bytes(name: str) -> bytes:
    """At most MAX_BYTES of a file, or of standard input for "-". Raises BadRequest."""
    if name == "-" and sys.stdin is None:
        raise BadRequest("-: standard input is closed; give the path of a file")
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as fault:
        raise BadRequest(f"{name}: {fault.strerror}; give the path of a file, or - for standard input") from fault
    if len(raw) > MAX_BYTES:
        raise BadRequest(f"{name}: larger than {MAX_BYTES >> 20} MiB; no context holds that")
    return raw


def chat_body(text: str, system: str | None) -> "dict[str, Json]":
    """A chat request that asks one question."""
    system = SYSTEM if system is None else system
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": text}]}


def chat_body_of_file(name: str) -> "dict[str, Json]":
    """A chat request, or its messages alone, from a JSON file. Raises BadRequest."""
    from ds4mlx.server.body import parse_object
    raw = read_bytes(name).removeprefix(b"\xef\xbb\xbf").strip()
    try:
        return parse_object(b'{"messages":%b}' % raw if raw[:1] == b"[" else raw)
    except BadRequest as fault:
        raise BadRequest(f"{name}: {fault}; give a chat request in JSON, or its list of messages") from fault


def prompt_ids(text: str, args: Namespace, settings: "Settings", tokenizer: "Tokenizer",
               metadata: Mapping[str, object]) -> list[int]:
    """The prompt of one question, rendered as `run` and the server would."""
    if args.raw_prompt:
        return raw_ids(text, tokenizer)
    from ds4mlx.server.fields import Fields
    from ds4mlx.server.openai_chat import read_chat
    from ds4mlx.service.encoding import prompt_for
    conversation = read_chat(Fields(chat_body(text, args.system)), settings).turn.conversation
    return tokenizer.encode(prompt_for(conversation, settings, metadata).segments)


def raw_ids(text: str, tokenizer: "Tokenizer") -> list[int]:
    """BOS and the text, in which nothing is special."""
    return [tokenizer.bos, *tokenizer.encode_literal(text)]


def checked_length(ids: list[int], context: int) -> list[int]:
    """`ids`, if the context holds them and one token more. Raises BadRequest."""
    if len(ids) >= context:
        raise BadRequest(f"the prompt is {len(ids)} tokens, the context {context}; shorten it or raise --ctx")
    return ids
