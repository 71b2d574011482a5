"""Tables for a terminal, and the same as aligned lines for a pipe."""
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Table(NamedTuple):
    """All cells are text, the first column a label."""
    title: str
    head: list[str]
    rows: list[list[str]]


def print_tables(tables: Iterable[Table]) -> None:
    """To standard output, in colour and boxes where it is a terminal."""
    if sys.stdout.isatty():
        print_rich(tables)
        return
    for i, table in enumerate(tables):
        print(*([""] if i else []), table.title, *aligned([table.head, *table.rows], right=True), sep="\n")


def aligned(rows: Iterable[list[str]], right: bool) -> Iterator[str]:
    """Lines of padded columns; all but the first to the right if asked."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.rjust(width) if right and i else cell.ljust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]
        yield "  ".join(cells).rstrip()


def print_rich(tables: Iterable[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Rich
    from rich.text import Text
    console = Console(markup=False, highlight=False)
    for title, head, rows in tables:
        table = Rich(title=Text(title), title_justify="left", box=box.SIMPLE)
        for i, label in enumerate(head):
            table.add_column(Text(label), justify="right" if i else "left", no_wrap=not i)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)


def size(nbytes: int) -> str:
    """Bytes in decimal units."""
    if nbytes < 1e6:
        return f"{nbytes / 1e3:.1f} kB"
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def elapsed(seconds: float) -> str:
    """A time that has passed, in its largest whole unit."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{int(seconds / unit)} {name}"
    return f"{max(0, int(seconds))} s"
