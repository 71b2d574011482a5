"""The command line: which command, its options, and what an error looks like and exits with.

0 done, 1 failed, 2 misused, 130 interrupted. A command module has `add_parser(subparsers)` and `run(args) -> int`, and
imports what is heavy inside `run`: `--help` needs none of it.
"""
import errno
import os
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn, TextIO

from ds4mlx import __version__
from ds4mlx.cli.topics import TOPICS
from ds4mlx.config import COMMANDS
from ds4mlx.errors import Ds4Error, UsageError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
DEFAULT = "chat"    # what is done without a command
NEAR = 0.65         # of difflib's 1 for equal: rum is near run, temp is not near system
OUTPUT_FAULTS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def console() -> NoReturn:
    """The `ds4mlx` program."""
    sys.stdout, sys.stderr = map(_stream, (sys.stdout, sys.stderr))
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as fault:
        if fault.errno not in OUTPUT_FAULTS:
            raise
        if fault.errno != errno.EPIPE:  # which is a reader that has left, as `| head` does
            print(f"ds4mlx: the output cannot be written ({fault.strerror}); make room", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered must not raise again at exit
        code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _stream(stream: TextIO | None) -> TextIO:
    """A stream that takes any text, whatever the locale; where a shell closed it, one that leads nowhere."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    return stream


def main(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code, or raises SystemExit after help or misuse."""
    parser = build_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in (*COMMANDS, "help"):
        parser.error(f"no command {argv[0]!r}{_near(argv[0], COMMANDS)}; ds4mlx help lists them")
    args, unknown = parser.parse_known_args(argv if _names_command(argv) else [DEFAULT, *argv])
    if unknown := _without_mtp(args.command, unknown):
        args.parser.error(_unknown(unknown, args.parser))
    try:
        return args.run(args)
    except Exception as fault:  # the outermost place: one line for a user, the traceback for who asks
        if getattr(args, "debug", False) or isinstance(fault, OSError) and fault.errno in OUTPUT_FAULTS:
            raise
        told = fault if isinstance(fault, Ds4Error) else f"internal error, {fault!r}; give --debug to see where"
        print(f"ds4mlx {args.command}: {told}", file=sys.stderr)
        return MISUSED if isinstance(fault, UsageError) else FAILED


def build_parser() -> ArgumentParser:
    parser = Parser(prog="ds4mlx", allow_abbrev=False, add_help=False, usage="ds4mlx [COMMAND] [OPTIONS]",
                    description="DeepSeek V4 Flash on one's own machine.",
                    epilog=f"Further topics of help: {', '.join(TOPICS)}.")
    parser.add_argument("-h", "--help", nargs="?", metavar="TOPIC", action=_Help,
                        help="show this, or the help of a command or topic")
    parser.add_argument("--version", action="version", version=f"ds4mlx {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser, prog="ds4mlx")
    for name in COMMANDS:
        import_module(f"ds4mlx.cli.{name}").add_parser(subparsers)
    helper = subparsers.add_parser("help", allow_abbrev=False, help="show the help of a command or topic")
    helper.add_argument("topic", nargs="?", metavar="TOPIC", help=f"a command, or one of {', '.join(TOPICS)}")
    helper.set_defaults(run=lambda args: _show_help(parser, args.topic))
    for name, command in subparsers.choices.items():
        command.usage = command.usage or f"ds4mlx {name} [OPTIONS]"  # all of them would hide an error above
        command.set_defaults(parser=command)
    return parser


class Parser(ArgumentParser):
    """Misuse is one line that names the option, then the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message}\n{self.format_usage()}")


class _Help(Action):
    """`-h`, `-h COMMAND`."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, topic: str | None, option: str | None) -> None:
        parser.exit(_show_help(parser, topic))


def _show_help(parser: ArgumentParser, topic: str | None) -> int:
    if topic is None:
        parser.print_help()
    elif topic not in (*COMMANDS, *TOPICS):
        parser.error(f"no help on {topic!r}{_near(topic, (*COMMANDS, *TOPICS))}; ds4mlx help lists what there is")
    elif topic in TOPICS:
        print(TOPICS[topic], end="")
    else:
        main([topic, "--help"])
    return 0


def _names_command(argv: Sequence[str]) -> bool:
    """Whether the line is for the parser of all commands: options alone are the default command's."""
    return bool(argv) and (not argv[0].startswith("-") or argv[0].partition("=")[0] in ("-h", "--help", "--version"))


def _unknown(arguments: Sequence[str], parser: ArgumentParser) -> str:
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            option = argument.partition("=")[0]
            known = [name for action in parser._actions if action.help != SUPPRESS for name in action.option_strings]
            return f"unknown option: {option}{_near(option, known)}"
    return f"unexpected argument: {arguments[0]}"


def _near(word: str, known: Iterable[str]) -> str:
    """What the word may have meant, if anything comes near it."""
    from difflib import get_close_matches
    bare = word.lstrip("-")     # the dashes would make any two options alike
    names = {name.lstrip("-"): name for name in known if len(name) > 2}
    close = get_close_matches(bare, names, cutoff=NEAR)
    close.sort(key=lambda name: not name.startswith(bare))  # --tok is nearer to --top-k, and short for --tokens
    near = close or [name for name in names if len(bare) > 1 and (name.startswith(bare) or bare.startswith(name))]
    return f", did you mean {names[near[0]]}?" if near else ""


def _without_mtp(command: str, unknown: Sequence[str]) -> list[str]:
    """Draft-model options of ds4 that are not known by name, with their values, do nothing here either."""
    rest: list[str] = []
    dropping = False
    for argument in unknown:
        if argument.startswith("--mtp"):
            print(f"ds4mlx {command}: {argument}: accepted for ds4 scripts, without effect here", file=sys.stderr)
            dropping = "=" not in argument
        elif not dropping or argument.startswith("-"):
            rest.append(argument)
            dropping = False
        else:
            dropping = False
    return rest
