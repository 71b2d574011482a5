"""`ds4mlx top`: what a running server is doing, as it does it."""
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import RenderableType

    from ds4mlx.cli.tables import Table
    from ds4mlx.cli.top_numbers import Reading

WIDTH = 20      # of a slot's bar, in characters
SECONDS = (0.1, 3600.0)


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "top", allow_abbrev=False, help="watch a running server",
        description="Slots, queue, what was reused and tokens per second of a running server, until Ctrl+C. Not on a "
                    "terminal, or with --once, one look.")
    parser.add_argument("url", nargs="?", metavar="URL", help="where the server listens (http://127.0.0.1:8000)")
    parser.add_argument("--api-key", metavar="K", help="the server's key, if it has one")
    parser.add_argument("--interval", metavar="F", default="1", help="seconds between two looks (1)")
    parser.add_argument("--once", action="store_true", help="two looks, one interval apart, and the second is shown")
    parser.add_argument("--json", action="store_true", help="that as one JSON object")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """0 when the user leaves. Raises UsageError, Ds4Error when no server answers at first."""
    from ds4mlx.cli.tables import print_tables
    from ds4mlx.cli.top_numbers import read
    from ds4mlx.cli.wire import base_url, server_address
    from ds4mlx.config import Settings
    interval = _interval(args.interval)
    settings = Settings.load("serve", vars(args))      # as the server is told
    url, key = base_url(args.url or server_address(settings), "URL"), settings.api_key
    first = read(url, key)
    if sys.stdout.isatty() and not (args.once or args.json):
        _watch(url, key, interval, first)
        return 0
    time.sleep(interval)
    now = read(url, key, first)
    if args.json:
        print(_as_json(now))
    else:
        print_tables(tables(url, now))
    return 0


def _interval(text: str) -> float:
    from ds4mlx.errors import UsageError
    low, high = SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not low <= seconds <= high:
        raise UsageError(f"--interval is {text[:40]!r}, need seconds from {low} to {high:.0f}")
    return seconds


def _as_json(now: "Reading") -> str:
    import json
    from dataclasses import asdict
    return json.dumps(asdict(now) | {"reused_share": now.reused_share}, allow_nan=False, default=str)


def _watch(url: str, key: str | None, interval: float, now: "Reading") -> None:
    """Until Ctrl+C. A server that stops answering is told of, and waited for."""
    from rich.console import Console
    from rich.live import Live

    from ds4mlx.cli.top_numbers import read
    from ds4mlx.errors import Ds4Error
    silent = ""
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(screen(url, now, silent), refresh=True)
                time.sleep(interval)
                try:
                    now, silent = read(url, key, now), ""
                except Ds4Error as fault:
                    silent = f"{fault} (the figures are {time.monotonic() - now.at:.0f} s old)"
        except KeyboardInterrupt:
            pass


def tables(url: str, now: "Reading") -> "Iterator[Table]":
    """The whole picture in text."""
    from ds4mlx.cli.tables import Table
    yield Table(f"{url}: {now.status}", ["", "now"], [[label, text] for label, text in facts(now)])
    yield Table("Slots", ["slot", "doing", "tokens", "of the context", "tokens/s"], [
        [str(slot.number), slot.phase, f"{slot.tokens:,}", f"{slot.tokens / now.context:.0%}", _rate(slot.tps)]
        for slot in now.slots])
    if now.sources:
        yield Table("Prompts, by what they went on from", ["from", "prompts", "tokens reused"], [
            [source, f"{n:,}", f"{now.prompt_tokens.get(source, 0):,}"]
            for source, n in sorted(now.sources.items(), key=lambda item: -item[1])])


def facts(now: "Reading") -> Iterator[tuple[str, str]]:
    """Label and text of each single number."""
    from ds4mlx.cli.tables import elapsed, size
    yield "up for", elapsed(now.uptime_s)
    yield "requests", f"{now.active} active, {now.queued} waiting, {now.requests:,} done, {now.errors:,} refused"
    yield "tokens/s", (f"{now.tps('prefilling'):,.0f} prefill, {now.tps('decoding'):,.1f} generation; "
                       f"of the last request {now.last_prefill_tps:,.0f} and {now.last_decode_tps:,.1f}")
    yield "generated", f"{now.generated:,} tokens"
    if now.reused_share is not None:
        computed = now.prompt_tokens.get("prefill", 0)
        yield "prompts", f"{now.reused_share:.1%} of their tokens reused, {computed:,} computed"
    if (half := now.first_token_s(0.5)) is not None:
        yield "first token", f"within {half:g} s for half, {now.first_token_s(0.9):g} s for nine of ten"
    if now.memory_bytes:
        yield "memory", size(now.memory_bytes)
    if now.disk_bytes is not None:
        yield "states on disk", f"{size(now.disk_bytes)} of {size(now.disk_budget_bytes)}"


def _rate(tps: float | None) -> str:
    return f"{tps:,.1f}" if tps else ""


def screen(url: str, now: "Reading", silent: str) -> "RenderableType":
    """The whole picture in colour."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
    head = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, text in facts(now):
        head.add_row(Text(label, "dim"), Text(text))
    slots = Table(box=box.SIMPLE)
    for label in ("slot", "doing", "", "tokens", "tokens/s"):
        slots.add_column(label, justify="right" if label in ("tokens", "tokens/s") else "left", no_wrap=True)
    for slot in now.slots:
        full = min(WIDTH, round(WIDTH * slot.tokens / now.context))
        style = {"idle": "dim", "prefilling": "yellow", "decoding": "green"}.get(slot.phase, "")
        bar = Text("━" * full, style) + Text("─" * (WIDTH - full), "dim")
        slots.add_row(str(slot.number), Text(slot.phase, style), bar, f"{slot.tokens:,} of {now.context:,}",
                      _rate(slot.tps))
    sources = "   ".join(f"{source} {n:,}" for source, n in sorted(now.sources.items(), key=lambda item: -item[1]))
    status = Text(f"{url}  ", "bold") + Text(now.status, "green" if now.status == "ok" and not silent else "red")
    parts: list[RenderableType] = [status, *([Text(silent, "red")] if silent else []), Text(), head, slots]
    if sources:
        parts += [Text("prompts went on from", "dim"), Text(sources)]
    return Group(*parts, Text(), Text("Ctrl+C leaves", "dim"))
