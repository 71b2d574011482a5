"""Rows of a benchmark on disk: CSV row by row, JSON whole each time. What is complete stays, whatever comes then."""
import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TextIO

from ds4mlx.cli.bench_measure import Frontier, Measured
from ds4mlx.errors import Ds4Error

COLUMNS = tuple(field.name for field in fields(Frontier))
SHORT = ("ctx_tokens", "prefill_tokens", "prefill_tps", "gen_tokens", "gen_tps", "kvcache_bytes")  # of older files
WHOLE = {field.name for field in fields(Frontier) if field.type is int}


def line(row: Frontier) -> str:
    return ",".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in asdict(row).values())


class CsvFile:
    """A file that holds the header and whole rows, and nothing else, at any moment but that of a write."""

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Raises Ds4Error where a file is that may not go, or none can be."""
        self.path = path
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if overwrite else os.O_EXCL)
            self._file = os.open(path, flags, 0o644)
        except FileExistsError:
            raise Ds4Error(f"--csv {path}: exists; give another path, or --overwrite to lose what it holds") from None
        except OSError as fault:
            raise Ds4Error(f"--csv {path}: {fault.strerror}; give a path that can be written") from fault
        self._write(",".join(COLUMNS))

    def add(self, row: Frontier) -> None:
        """Raises Ds4Error with the row in it when the disk is full; the rows before it stay."""
        self._write(line(row))

    def _write(self, text: str) -> None:
        data = text.encode() + b"\n"
        before = os.lseek(self._file, 0, os.SEEK_END)
        try:
            if os.write(self._file, data) < len(data):
                raise OSError("the disk is full")
            os.fsync(self._file)
        except OSError as fault:
            os.ftruncate(self._file, before)    # half a row would be read as a whole one
            raise Ds4Error(f"--csv {self.path}: {fault.strerror or fault}; the rows before are there, this one is "
                           f"not: {text}") from fault

    def close(self) -> None:
        os.close(self._file)


class CsvStream:
    """Rows to a pipe, as they come; to a terminal all at the end, when no live table is in the way."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._late = out, out.isatty() and sys.stderr.isatty()
        self._held: list[str] = []
        self._write(",".join(COLUMNS))

    def add(self, row: Frontier) -> None:
        self._write(line(row))

    def _write(self, text: str) -> None:
        self._held.append(text + "\n")
        if not self._late:
            self.close()

    def close(self) -> None:
        self._out.write("".join(self._held))
        self._out.flush()
        self._held.clear()


class JsonFile:
    """One object: what was measured on what, and the rows so far. Replaced whole."""

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        self.path, self._head, self._rows = path, dict(head), list[dict[str, object]]()

    def add(self, measured: Measured, extra: Mapping[str, object]) -> None:
        """Raises Ds4Error when it cannot be written; the file with the rows before stays."""
        runs = [asdict(run) for run in measured.runs] if len(measured.runs) > 1 else []
        self._rows.append({**asdict(measured.row), **extra, **({"runs": runs} if runs else {})})
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump({**self._head, "rows": self._rows}, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError as fault:
            with suppress(OSError):
                partial.unlink()
            raise Ds4Error(f"--json {self.path}: {fault.strerror}; the rows before are kept") from fault


def read_csv(path: Path) -> list[Frontier]:
    """A file of this command, or of ds4's benchmark, also of the time when it had six columns. Raises Ds4Error."""
    try:
        rows = list(csv.reader(path.read_text("utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as fault:
        found = getattr(fault, "strerror", None) or "not UTF-8"
        raise Ds4Error(f"{path}: {found}; give a CSV file of bench") from fault
    head = tuple(rows[0]) if rows else ()
    if head not in (COLUMNS, SHORT):
        raise Ds4Error(f"{path}: begins with {','.join(head)[:80]!r}, need {','.join(COLUMNS)}")
    return [_row(path, number, head, cells) for number, cells in enumerate(rows[1:], 2) if cells]


def _row(path: Path, number: int, head: Sequence[str], cells: Sequence[str]) -> Frontier:
    try:
        given = dict(zip(head, cells, strict=True))
        return Frontier(**{name: (int if name in WHOLE else float)(given.get(name, "0")) for name in COLUMNS})
    except ValueError as fault:
        raise Ds4Error(f"{path}: line {number} is no row of {len(head)} numbers ({fault}); correct the file") from fault
