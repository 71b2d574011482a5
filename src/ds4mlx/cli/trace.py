"""`ds4mlx trace`: what each request of a trace reused, and why no more, in words. Needs no model.

Reads what `serve --trace FILE --trace-format jsonl` wrote, from a server that may still be running. Of what was said,
only the tokens around the first mismatch are shown.
"""
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli.tables import Table, print_tables
from ds4mlx.errors import BadRequest, UsageError
from ds4mlx.text.escaping import printable

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.chat.messages import Json

MOST_LINE_BYTES = 1 << 28   # a request's body and its prompt are a record, as large as --max-body-mb lets them be
TYPES = ("request", "cache", "token", "event", "finish")
WORST = 5
WENT_ON = {
    "memory-token": "the live state went on, token for token",
    "memory-text": "the live state went on, by its text",
    "memory-rewind": "the live state went back to that length",
    "thinking-visible": "the live state went on, by what the client sends back of it",
    "responses-visible": "the live state went on, by what the client sends back of it",
    "chat-tool-output": "the live state went on, by the ids of its tool calls",
    "anthropic-tool-output": "the live state went on, by the ids of its tool calls",
    "responses-tool-output": "the live state went on, by the ids of its tool calls",
}


@dataclass(frozen=True, slots=True)
class Parting:
    """One position of the live state and the prompt, each as id and text; "" behind an end."""
    position: int
    live: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Reused:
    """One request of a trace. Lengths in tokens; source "" for one that never ran."""
    request: int
    time: float
    api: str
    prompt: int
    reused: int
    source: str
    live: int               # of the live state before it
    common: int             # that live state and prompt begin with
    slot: int
    donor: int | None       # the slot that the reused tokens are shared with
    because: str
    file: str               # of a state that came from disk
    rejected: tuple[tuple[str, str], ...]
    rendered_anew: int      # messages with calls that were not repeated as sampled
    unknown_ids: int
    finish: str             # "" while it goes on
    parting: tuple[Parting, ...]

    @property
    def computed(self) -> int:
        return self.prompt - self.reused

    @property
    def missed(self) -> int:
        """Tokens that would not have been computed if the prompt had gone on from what there was, as far as that went;
        all that were, where nothing was live. Another conversation in turn counts as a miss: it cannot be told apart.
        """
        return max(0, (min(self.live, self.prompt) if self.live else self.prompt) - self.reused)


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "trace", allow_abbrev=False, help="explain what requests reused, from a server's trace",
        usage="ds4mlx trace [OPTIONS] FILE",
        description="Every request of a trace with what it reused and why no more, then the worst misses with the "
                    "tokens where prompt and live state part.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="written by serve --trace FILE --trace-format jsonl")
    parser.add_argument("--worst", metavar="N", help=f"so many of the worst misses; 0: none ({WORST})")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Print to standard output. Raises UsageError, BadRequest for a file that is no trace."""
    if args.file is None:
        raise UsageError("no trace is named; need the FILE of serve --trace FILE --trace-format jsonl")
    if args.worst is not None and not (args.worst.isdecimal() and len(args.worst) < 7):
        raise UsageError(f"--worst is {args.worst[:40]!r}, need a whole number")
    count = WORST if args.worst is None else int(args.worst)
    requests = read_trace(Path(args.file))
    worst = sorted((r for r in requests if r.missed), key=lambda r: (-r.missed, r.request))[:count]
    if args.json:
        print(json.dumps({"requests": [asdict(r) | {"computed": r.computed, "missed": r.missed, "words": words(r)}
                                       for r in requests], "worst": [r.request for r in worst]}, indent=2))
        return 0
    print_tables([_overview(requests, args.file)])
    print("", *(f"{r.request}: {words(r)}" for r in requests), sep="\n")
    if worst:
        print("\nWorst misses")
    for request in worst:
        print(f"\n{request.request}: {request.missed:,} tokens computed that might have been there: {words(request)}")
        if request.parting:
            print_tables([_mismatch(request)])
    return 0


# ---- reading

Record = dict[str, "Json"]


def read_trace(path: Path) -> list[Reused]:
    """The requests of a trace in order. A last line that is still being written is left out. Raises BadRequest."""
    seen: dict[int, dict[str, Record]] = {}
    for record in _records(path):
        number, kind = _int(record, "request"), _str(record, "type")
        if kind in ("request", "cache", "finish"):
            record.pop("raw", None)
            record.pop("prompt", None)
            seen.setdefault(number, {})[kind] = record
    # After a new file was begun, the end of a request may be there without its beginning.
    return [_reused(number, told) for number, told in sorted(seen.items()) if "request" in told or "cache" in told]


def _records(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES):
                number += 1
                if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                    return
                yield _record(line, number, path)
    except OSError as fault:
        raise BadRequest(f"{path}: {fault.strerror}; give the path of a trace") from fault


def _record(line: bytes, number: int, path: Path) -> Record:
    if line.startswith(b"====="):
        raise BadRequest(f"{path} is a trace for people; read it, or let serve write one with --trace-format jsonl")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("type") not in TYPES:
        raise BadRequest(f"{path}: line {number} is no record of a trace; give a file that serve wrote with "
                         "--trace-format jsonl")
    return record


def _reused(number: int, told: dict[str, Record]) -> Reused:
    asked, cache, end = told.get("request", {}), told.get("cache", {}), told.get("finish", {})
    replay = _dict(cache, "tool_replay")
    return Reused(
        request=number, time=_int(asked, "time"), api=_str(asked, "api"),
        prompt=_int(cache, "effective_prompt_tokens") or _int(asked, "prompt_tokens"),
        reused=_int(cache, "cached_tokens"), source=_str(cache, "cache_source"),
        live=_int(cache, "live_tokens_before"), common=_int(cache, "live_prompt_common"),
        slot=_int(cache, "slot"), donor=_int(cache, "donor") if cache.get("donor") is not None else None,
        because=_str(cache, "because"), file=_str(cache, "disk_cache_file"),
        rejected=tuple((printable(file), printable(str(why))) for file, why in _dict(cache, "rejected").items()),
        rendered_anew=_int(replay, "canonical"), unknown_ids=_int(replay, "missing_ids"), finish=_str(end, "finish"),
        parting=tuple(_parting(row) for row in _list(cache, "first_mismatch") if isinstance(row, dict)))


def _parting(row: Record) -> Parting:
    def shown(token: Record) -> str:
        return f"{_int(token, 'id')} {_str(token, 'piece')}" if token else ""

    return Parting(_int(row, "position"), shown(_dict(row, "live")), shown(_dict(row, "prompt")))


def _int(record: Record, key: str) -> int:
    value = record.get(key)
    return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 53 else 0


def _str(record: Record, key: str) -> str:
    value = record.get(key)
    return printable(value) if isinstance(value, str) else ""


def _dict(record: Record, key: str) -> Record:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _list(record: Record, key: str) -> "list[Json]":
    value = record.get(key)
    return value if isinstance(value, list) else []


# ---- telling

def words(request: Reused) -> str:
    """What was reused, from where, and why no more."""
    if not request.source:
        return f"it never began ({request.finish or 'no end is recorded'})."
    if request.reused:
        how = f"a state on disk was read, {request.file}" if request.source == "disk-text" else \
            f"slot {request.slot} shares them with slot {request.donor}" if request.donor is not None else \
            WENT_ON.get(request.source, request.source)
        said = [f"{request.reused:,} of {request.prompt:,} tokens were there: {how}"]
    else:
        said = [f"none of {request.prompt:,} tokens were there"]
    if request.because:
        said.append(request.because)
    said += [f"{file[:8]} was not used: {why}" for file, why in request.rejected]
    if request.rendered_anew:
        said.append(f"the calls of {request.rendered_anew} messages were rendered anew, not repeated as sampled"
                    + (f": {request.unknown_ids} ids are unknown" if request.unknown_ids else ""))
    return "; ".join(said) + "."


def _overview(requests: list[Reused], file: str) -> Table:
    rows = [[str(r.request), r.api, r.source or "-", f"{r.prompt:,}", f"{r.reused:,}", f"{r.computed:,}",
             f"{r.live:,}", f"{r.common:,}"] for r in requests]
    prompt, reused = sum(r.prompt for r in requests), sum(r.reused for r in requests)
    title = (f"{len(requests)} requests in {file}: {reused:,} of {prompt:,} prompt tokens were there, "
             f"{prompt - reused:,} computed")
    return Table(title, ["no", "api", "source", "prompt", "reused", "computed", "live", "common"], rows)


def _mismatch(request: Reused) -> Table:
    return Table(f"Tokens around the first mismatch, at {request.common:,}", ["position", "", "live", "prompt"], [
        [str(row.position), "" if row.live == row.prompt else "*", row.live, row.prompt] for row in request.parting])
