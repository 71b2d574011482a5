"""`ds4mlx cache`: list, check, cut down or clear the states that servers keep on disk. Needs no model.

A server may be running on the directory. As any process that opens it does, listing moves bad files to quarantine.
"""
import json
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli.options import settings_from
from ds4mlx.cli.tables import Table, aligned, elapsed, print_tables, size
from ds4mlx.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.chat.messages import Json
    from ds4mlx.sessions.clearing import Freed
    from ds4mlx.sessions.directory import CacheDirectory
    from ds4mlx.sessions.format import Head
    from ds4mlx.sessions.index import Index
    from ds4mlx.sessions.survey import State, Survey

SHORT = 8                    # digits of a name that are shown
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
ACTIONS = {
    "ls": "list the states, the one used last first",
    "show": "describe one state; its text only with --text",
    "verify": "read every file and check its checksums",
    "prune": "delete what is old or worth least",
    "clear": "delete everything",
}


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "cache", allow_abbrev=False, help="list, check or clear the states on disk",
        usage="ds4mlx cache ACTION [OPTIONS]",
        description="States of conversations that servers keep in --kv-disk-dir. Safe while a server is running.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", prog="ds4mlx cache")
    for name, told in ACTIONS.items():
        action = actions.add_parser(name, allow_abbrev=False, help=told, description=told[0].upper() + told[1:] + ".",
                                    usage=f"ds4mlx cache {name} {'KEY-PREFIX ' * (name == 'show')}[OPTIONS] [DIR]")
        if name == "show":
            action.add_argument("key", metavar="KEY-PREFIX", help="first digits of a state's name, as ls shows them")
        _add_flags(action, name)
        action.set_defaults(parser=action)
    parser.set_defaults(run=run)


def _add_flags(action: ArgumentParser, name: str) -> None:
    action.add_argument("dir", nargs="?", metavar="DIR", help="the directory: --kv-disk-dir without the flag")
    action.add_argument("--kv-disk-dir", metavar="DIR", help="directory of the states (DS4MLX_KV_DISK_DIR)")
    action.add_argument("--config", metavar="FILE", help="TOML file of settings")
    action.add_argument("--debug", action="store_true", help="show where an error came from")
    if name in ("ls", "show", "verify"):
        action.add_argument("--json", action="store_true", help="one JSON object")
    if name == "ls":
        action.add_argument("--kv-disk-space-mb", metavar="N", help="the server's budget in MiB (4096)")
    if name == "show":
        action.add_argument("--text", action="store_true", help="print the text that the state covers")
    if name == "prune":
        action.add_argument("--to-mb", metavar="N", help="until at most so many MiB are left")
        action.add_argument("--older-than", metavar="TIME", help="what was not used for so long: 90m, 12h, 7d, 4w")
    if name == "clear":
        action.add_argument("--yes", action="store_true", help="do not ask")


def run(args: Namespace) -> int:
    """0; 1 when a file is bad or the owner says no. Raises UsageError, CheckpointError."""
    run_action: dict[str | None, Callable[[Namespace], int]] = {
        "ls": _ls, "show": _show, "verify": _verify, "prune": _prune, "clear": _clear}
    if args.action is None:
        raise UsageError(f"no action is given, need one of {', '.join(ACTIONS)}; see ds4mlx cache --help")
    return run_action[args.action](args)


# ---- the directory

@contextmanager
def _opened(args: Namespace) -> "Iterator[CacheDirectory]":
    """The directory that the command line means. It is not made here, and nothing is put into one of other things."""
    from ds4mlx.sessions.directory import TAG, CacheDirectory
    named = settings_from(args).kv_disk_dir
    if args.dir and args.kv_disk_dir:
        raise UsageError(f"both {args.dir} and --kv-disk-dir {args.kv_disk_dir} are given, need one directory")
    path = Path(args.dir) if args.dir else named
    if path is None:
        raise UsageError("no directory is named; give --kv-disk-dir DIR, or set DS4MLX_KV_DISK_DIR")
    path = path.expanduser()
    try:
        with open(path / TAG, "rb") as tag:
            ours = b"ds4mlx" in tag.read(1024)
    except OSError:
        ours = False
    if not ours:
        raise CheckpointError(f"{path}: no server has kept states here (no {TAG} of ds4mlx); give the --kv-disk-dir of "
                              "one")
    directory = CacheDirectory(path)
    try:
        yield directory
    except OSError as fault:
        raise CheckpointError(f"{path}: {fault.strerror}; see that you may read and write there") from fault
    finally:
        directory.close()


def _index(directory: "CacheDirectory") -> "Index":
    from ds4mlx.sessions.index import Index
    index = Index(directory)
    index.refresh(force=True)
    return index


# ---- ls

def _ls(args: Namespace) -> int:
    from ds4mlx.sessions.survey import survey
    budget = settings_from(args).kv_disk_space_mb << 20
    with _opened(args) as directory:
        found = survey(directory, _index(directory), time.time())
    if args.json:
        print(json.dumps({"directory": str(directory.path), "budget_bytes": budget} | asdict(found), indent=2))
    else:
        print_tables(_listing(found, directory.path, budget, time.time()))
    return 0


def _listing(found: "Survey", path: Path, budget: int, now: float) -> Iterator[Table]:
    yield Table(f"States in {path}, the one used last first. segs: segments (of them, shared); turn: to be evicted", [
        "state", "key", "reason", "tokens", "hits", "used", "size", "segs", "turn"],
        [_row(state, now) for state in found.states])
    kinds = (("segments", found.segments), ("aliases", found.aliases), ("quarantined", found.quarantined),
             ("of other versions", found.foreign), ("being written", found.unfinished))
    rows = [[label, str(files.count), size(files.nbytes)] for label, files in kinds if files.count]
    yield Table(f"In all {size(found.total_bytes)} of {size(budget)}", ["besides", "files", "size"], rows)


def _row(state: "State", now: float) -> list[str]:
    turn = "never" if state.evicted_after is None else f"{state.evicted_after + 1}."
    return [state.name[:SHORT], state.key_kind.partition("-")[0], state.reason, f"{state.tokens:,}", str(state.hits),
            elapsed(now - state.last_used), size(state.size_bytes), f"{state.segments} ({state.shared_segments})", turn]


# ---- show

def _show(args: Namespace) -> int:
    from ds4mlx.sessions.format import read_head
    from ds4mlx.sessions.survey import survey
    with _opened(args) as directory:
        index = _index(directory)
        name = _named(index, args.key)
        file, found = directory.open(name)
        with file:
            head = read_head(file, found.nbytes).head
        state = next(s for s in survey(directory, index, time.time()).states if s.name == name)
        aliases = {alias.found.name: alias.key_kind for alias in index.aliases_of(name)}
    if args.json:
        print(json.dumps(_described(state, head, aliases, args.text), indent=2, ensure_ascii=False))
        return 0
    print(*aligned(_facts(state, head, aliases), right=False), sep="\n")
    if args.text:
        from ds4mlx.text.escaping import printable
        print("", printable(_text(head)), sep="\n")
    return 0


def _named(index: "Index", prefix: str) -> str:
    """The one state whose name, or whose alias's, begins with `prefix`. Raises UsageError."""
    names = {name for name in index.heads if name.startswith(prefix)}
    names |= {alias.target for name, alias in index.aliases.items() if name.startswith(prefix)}
    found = sorted(names & index.heads.keys())
    if len(found) != 1:
        told = ", ".join(name[:SHORT] for name in found[:5]) if found else "ls lists them"
        raise UsageError(f"{len(found) or 'no'} states are named {prefix}…, need one: {told}")
    return found[0]


def _facts(state: "State", head: "Head", aliases: dict[str, str]) -> Iterator[list[str]]:
    now, identity = time.time(), head.identity
    yield ["file", state.name]
    yield ["key", f"{state.key_kind}, {state.text_bytes:,} bytes"]
    yield from (["alias", f"{name}, {kind}"] for name, kind in sorted(aliases.items()))
    yield ["saved", f"{_date(state.created)} as {state.reason}, by {head.writer}"]
    yield ["used", f"{state.hits} times, {elapsed(now - state.last_used)} ago"]
    yield ["tokens", f"{state.tokens:,} of a context of {state.ctx:,}"]
    yield ["size", f"{size(state.own_bytes)}, with its share of segments {size(state.size_bytes)}"]
    yield ["segments", f"{state.segments}, {state.shared_segments} of them shared"]
    yield ["tool calls", f"{state.tool_calls} that can be repeated as sampled"]
    yield ["base", identity.base_fp]
    yield ["weights", identity.weights_fp]
    yield ["tokenizer", identity.tokenizer_fp]
    yield ["layout", f"{identity.layout_fp}, version {identity.engine_abi}, {identity.quant_bits}-bit experts"]


def _described(state: "State", head: "Head", aliases: dict[str, str], with_text: bool) -> "dict[str, Json]":
    described = asdict(state) | {"identity": asdict(head.identity), "writer": head.writer,
                                 "segment_names": list(head.segments), "alias_names": aliases}
    return described | ({"text": _text(head)} if with_text else {})


def _text(head: "Head") -> str:
    """The key as people read it: without the marks, 0xFF, before what only looks like a control token."""
    return re.sub(b"\xff(\xff?)", rb"\1", head.key).decode("utf-8", "replace")


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(seconds, 1 << 36)))


# ---- verify

def _verify(args: Namespace) -> int:
    from ds4mlx.sessions.verify import verify
    with _opened(args) as directory:
        checked = list(verify(directory))
    bad = [file for file in checked if file.verdict == "bad"]
    if args.json:
        print(json.dumps({"directory": str(directory.path), "files": [asdict(file) for file in checked]}, indent=2))
        return 1 if bad else 0
    rows = [[file.name, file.verdict, file.why] for file in checked if file.verdict != "sound"]
    print(*aligned(rows, right=False), sep="\n", end="\n" if rows else "")
    print(f"{len(checked)} files, {size(sum(file.nbytes for file in checked))}: {len(bad) or 'none'} bad")
    if bad:
        print("a server loads none of them and sets them aside when it meets them", file=sys.stderr)
    return 1 if bad else 0


# ---- prune, clear

def _prune(args: Namespace) -> int:
    from ds4mlx.sessions.clearing import prune
    if args.to_mb is None and args.older_than is None:
        raise UsageError("nothing says what to delete; give --to-mb N, --older-than TIME or both")
    to_bytes = None if args.to_mb is None else _megabytes(args.to_mb)
    since = None if args.older_than is None else time.time() - _seconds(args.older_than)
    with _opened(args) as directory:
        _tell(prune(directory, _index(directory), to_bytes=to_bytes, unused_since=since))
    return 0


def _megabytes(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UsageError(f"--to-mb is {text[:40]!r}, need a whole number of MiB")
    return int(text) << 20


def _seconds(text: str) -> int:
    found = re.fullmatch("([0-9]{1,9})([smhdw])", text)
    if found is None:
        raise UsageError(f"--older-than is {text[:40]!r}, need a number and a unit, as 90m, 12h, 7d or 4w")
    return int(found[1]) * UNIT_S[found[2]]


def _clear(args: Namespace) -> int:
    from ds4mlx.sessions.clearing import clear
    with _opened(args) as directory:
        index = _index(directory)
        asked = f"delete {len(index.heads)} states, {size(index.total_bytes())}, in {directory.path}?"
        if not args.yes and not _agreed(asked):
            print("nothing is deleted; --yes answers beforehand", file=sys.stderr)
            return 1
        _tell(clear(directory, index))
    return 0


def _agreed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin is not None and sys.stdin.readline().strip().lower() in ("y", "yes")


def _tell(freed: "Freed") -> None:
    print(f"deleted {freed.states} states, {size(freed.nbytes)}; {freed.states_left} states, {size(freed.bytes_left)}, "
          "are left")
