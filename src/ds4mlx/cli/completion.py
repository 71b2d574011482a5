"""`ds4mlx completion SHELL`: a script that completes commands, options and their values, made from the parsers."""
import re
import shlex
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")
HOW = """\
# bash:  ds4mlx completion bash > ~/.local/share/bash-completion/completions/ds4mlx
# zsh:   ds4mlx completion zsh > FOLDER/_ds4mlx, for a FOLDER that is in $fpath before compinit runs
# fish:  ds4mlx completion fish > ~/.config/fish/completions/ds4mlx.fish
"""
_CHOICES = re.compile(r"[\w.-]+(\|[\w.-]+)+")


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "completion", allow_abbrev=False, help="print a script that completes command lines",
        description="For the shell's folder of completions; the script begins with where that is.")
    parser.add_argument("shell", choices=SHELLS, metavar="bash|zsh|fish", help="which shell")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Print to standard output."""
    from ds4mlx.cli.main import build_parser
    script = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell]
    print(HOW + "\n".join(script(list(places(build_parser())))))
    return 0


@dataclass(frozen=True, slots=True)
class Option:
    """values: what may follow, if that is known; files: it is a path; alone: nothing follows."""
    names: tuple[str, ...]
    about: str
    values: tuple[str, ...]
    files: bool
    alone: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A command, or an action of one: "cache ls". words: what may stand in it, with what it does."""
    name: str
    words: tuple[tuple[str, str], ...]
    files: bool
    options: tuple[Option, ...]


def places(parser: ArgumentParser, name: str = "") -> Iterator[Place]:
    """The parser of all commands, then each command, then their actions."""
    options: list[Option] = []
    words: list[tuple[str, str]] = []
    files = False
    inner: list[tuple[str, ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            words += [(choice.dest, choice.help or "") for choice in action._choices_actions]
            inner += list(action.choices.items())
        elif action.option_strings and action.help != SUPPRESS:
            options.append(_option(action))
        elif not action.option_strings:
            words += [(choice, "") for choice in action.choices or ()]
            files = files or _is_path(action)
    yield Place(name, tuple(words), files, tuple(options))
    for word, command in inner:
        yield from places(command, f"{name} {word}".strip())


def _option(action: Action) -> Option:
    shown = action.metavar if isinstance(action.metavar, str) else ""
    values = tuple(action.choices or (shown.split("|") if _CHOICES.fullmatch(shown) else ()))
    return Option(tuple(action.option_strings), _plain(action.help), values, _is_path(action), action.nargs == 0)


def _is_path(action: Action) -> bool:
    return isinstance(action.metavar, str) and action.metavar in ("FILE", "DIR")


def _plain(about: str | None) -> str:
    """One line that needs no quoting inside quotes."""
    return re.sub(r"[\\\"'`$\[\]:]", "", (about or "").replace("%%", "%"))


def _cases(places: list[Place]) -> Iterator[tuple[str, Option]]:
    """A pattern of `case` for each option that something follows: every name of it behind its command."""
    for place in places:
        for option in place.options:
            if not option.alone:
                yield "|".join(shlex.quote(f"{place.name} {name}") for name in option.names), option


def bash(places: list[Place]) -> Iterator[str]:
    commands = [word for word, _ in places[0].words]
    yield "_ds4mlx() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} place="" word i IFS=$\'\\n\''
    yield '    if [ "$cur" = "=" ]; then cur=""; elif [ "$prev" = "=" ]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi'
    yield "    for ((i = 1; i < COMP_CWORD; i++)); do"
    yield "        word=${COMP_WORDS[i]}"
    yield '        case "$place $word" in'
    yield "            " + "|".join(shlex.quote(f" {command}") for command in commands) + ") place=$word ;;"
    if nested := [place.name for place in places if " " in place.name]:
        yield "            " + "|".join(shlex.quote(name) for name in nested) + ') place="$place $word" ;;'
    yield "        esac"
    yield "    done"
    yield '    case "$place $prev" in'
    for pattern, option in _cases(places):
        yield f"        {pattern}) {_bash_values(option)}; return ;;"
    yield "    esac"
    yield '    case "$place" in'
    for place in places:
        words = [word for word, _ in place.words] + [name for option in place.options for name in option.names]
        files = ' $(case "$cur" in -*) ;; *) compgen -f -- "$cur" ;; esac)' if place.files else ""
        yield (f"        {shlex.quote(place.name)}) COMPREPLY=($(compgen -W $'" + "\\n".join(words)
               + f"' -- \"$cur\"){files}) ;;")
    yield "    esac"
    yield "}"
    yield "complete -o filenames -F _ds4mlx ds4mlx"


def _bash_values(option: Option) -> str:
    if option.files:
        return 'COMPREPLY=($(compgen -f -- "$cur"))'
    words = "\\n".join(option.values)
    return f"COMPREPLY=($(compgen -W $'{words}' -- \"$cur\"))"


def zsh(places: list[Place]) -> Iterator[str]:
    commands = [word for word, _ in places[0].words]
    yield "#compdef ds4mlx"
    yield "_ds4mlx() {"
    yield '    local place="" word prev=${words[CURRENT-1]}'
    yield "    local -a found"
    yield "    for word in ${words[2,CURRENT-1]}; do"
    yield '        case "$place $word" in'
    yield "            (" + "|".join(shlex.quote(f" {command}") for command in commands) + ") place=$word ;;"
    if nested := [place.name for place in places if " " in place.name]:
        yield "            (" + "|".join(shlex.quote(name) for name in nested) + ') place="$place $word" ;;'
    yield "        esac"
    yield "    done"
    yield '    case "$place $prev" in'
    for pattern, option in _cases(places):
        does = "_files" if option.files else f"found=({' '.join(option.values)}); _describe value found"
        yield f"        ({pattern}) {does}; return ;;"
    yield "    esac"
    yield '    case "$place" in'
    for place in places:
        told = [*place.words, *((name, option.about) for option in place.options for name in option.names)]
        rows = " ".join(f"'{name}:{_plain(about)}'" for name, about in told)
        files = "; _files" if place.files else ""
        yield f"        ({shlex.quote(place.name)}) found=({rows}); _describe ds4mlx found{files} ;;"
    yield "    esac"
    yield "}"
    yield 'if [ "$funcstack[1]" = _ds4mlx ]; then _ds4mlx "$@"; else compdef _ds4mlx ds4mlx; fi'


def fish(places: list[Place]) -> Iterator[str]:
    commands = [word for word, _ in places[0].words]
    yield "complete -c ds4mlx -f"
    for place in places:
        first, _, second = place.name.partition(" ")
        inner = [word for word, _ in place.words]
        if not place.name:
            when = f"not __fish_seen_subcommand_from {' '.join(commands)}"
        elif second:
            when = f"__fish_seen_subcommand_from {first}; and __fish_seen_subcommand_from {second}"
        else:
            when = f"__fish_seen_subcommand_from {first}"
        unless = f"; and not __fish_seen_subcommand_from {' '.join(inner)}" if inner and place.name else ""
        for word, about in place.words:
            yield f"complete -c ds4mlx -n '{when}{unless}' -a {word} -d '{_plain(about)}'"
        if place.files:
            yield f"complete -c ds4mlx -n '{when}' -F"
        for option in place.options:
            yield f"complete -c ds4mlx -n '{when}' {_fish_names(option)}{_fish_values(option)} -d '{option.about}'"


def _fish_names(option: Option) -> str:
    """`-l long`, `-s x`, and `-o sys` for a long name of one dash."""
    kinds = ("-l " + name[2:] if name.startswith("--") else ("-s " if len(name) == 2 else "-o ") + name[1:]
             for name in option.names)
    return " ".join(kinds)


def _fish_values(option: Option) -> str:
    if option.alone:
        return ""
    return " -r -F" if option.files else f" -x -a '{' '.join(option.values)}'"
