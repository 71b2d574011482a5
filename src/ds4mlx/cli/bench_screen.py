"""A benchmark as it goes, on standard error: a live table on a terminal, else a line a frontier."""
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ds4mlx.cli.bench_measure import Frontier, Sweep
from ds4mlx.cli.tables import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

HEAD = ("context", "prefill", "tokens/s", "decode", "tokens/s", "first ms", "then tokens/s", "state")
REFRESHES_S = 4
FRAME = 7       # lines of the live table beside its rows


class Screen:
    """To be entered; `told` is for `measure`, `add` for each row."""

    def __init__(self, sweep: Sweep, title: str, color: bool) -> None:
        self._sweep, self._title, self._color = sweep, title, color
        self._rows: list[Frontier] = []
        self._doing = ""
        self._live: "Live | None" = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live
            self._live = Live(console=Console(stderr=True, no_color=not self._color, highlight=False),
                              get_renderable=self._picture, refresh_per_second=REFRESHES_S, redirect_stdout=False,
                              redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._doing = ""
        if self._live is not None:
            self._live.stop()

    def told(self, what: str, done: int, total: int) -> None:
        at = self._sweep.frontiers[min(len(self._rows), len(self._sweep.frontiers) - 1)]
        self._doing = f"{what} at {at:,}: {done:,} of {total:,} tokens"

    def add(self, row: Frontier) -> None:
        self._rows.append(row)
        if self._live is None:
            print(f"{row.ctx_tokens:,} tokens: prefill {row.prefill_tps:.2f} t/s, generation {row.gen_tps:.2f} t/s"
                  f"{self._each(row)}", file=sys.stderr)

    def _each(self, row: Frontier) -> str:
        n = self._sweep.concurrency
        return f" of {n} sessions, {row.gen_tps / n:.2f} each" if n > 1 else ""

    def _picture(self) -> "RenderableType":
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
        table = Table(title=Text(self._title), title_justify="left", box=box.SIMPLE)
        for label in (*HEAD, *(["each tokens/s"] if self._sweep.concurrency > 1 else [])):
            table.add_column(label, justify="right", no_wrap=True)
        most = max(1, self._live.console.height - FRAME) if self._doing and self._live else len(self._rows)
        for row in self._rows[-most:]:      # all of them when it is over
            table.add_row(*cells(row), *([f"{row.gen_tps / self._sweep.concurrency:.2f}"]
                                         if self._sweep.concurrency > 1 else []))
        left = f"{len(self._rows)} of {len(self._sweep.frontiers)} frontiers"
        return Group(table, Text(f"{left}  {self._doing}", "dim")) if self._doing else Group(table)


def cells(row: Frontier) -> list[str]:
    """Of the table with HEAD."""
    return [f"{row.ctx_tokens:,}", f"+{row.prefill_tokens:,}", f"{row.prefill_tps:.2f}", f"{row.gen_tokens:,}",
            f"{row.gen_tps:.2f}", f"{row.gen_first_ms:.1f}", f"{row.gen_steady_tps:.2f}", size(row.kvcache_bytes)]
