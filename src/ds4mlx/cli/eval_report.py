"""What came of an evaluation: a table of cases, totals, one JSON object, and whether it is enough."""
import json
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds4mlx.cli.tables import Table, print_tables
from ds4mlx.errors import Ds4Error, UsageError
from ds4mlx.evaluation.grading import Verdict, grade
from ds4mlx.evaluation.trace import Record, read_trace
from ds4mlx.text.escaping import harmless

VERDICTS: tuple[Verdict, ...] = ("passed", "failed", "incomplete")
WIDTH = 40      # of an answer in a table
UNMET = 3


def tables(records: Sequence[Record]) -> list[Table]:
    """One of all cases, one of totals by source and domain."""
    cases = Table("Cases", ["case", "source", "prompt", "generated", "seconds", "verdict", "given", "expected"], [
        [r.case.id, r.case.source, f"{r.prompt_tokens:,}", f"{r.tokens:,}", f"{r.seconds:.1f}", r.grade.verdict,
         _cut(r.grade.given), _cut(r.grade.expected)] for r in records])
    groups = dict.fromkeys((r.case.source, r.case.domain) for r in records)
    rows = [[source, domain or "-",
             *_counts([r for r in records if (r.case.source, r.case.domain) == (source, domain)])]
            for source, domain in groups]
    totals = Table("Totals", ["source", "domain", "cases", *VERDICTS], [*rows, ["all", "", *_counts(records)]])
    return [cases, totals]


def _counts(records: Sequence[Record]) -> list[str]:
    return [str(len(records)), *(str(sum(r.grade.verdict == verdict for r in records)) for verdict in VERDICTS)]


def _cut(text: str) -> str:
    line = harmless(" ".join(text.split()))
    return line if len(line) <= WIDTH else line[:WIDTH - 1] + "…"


def least(text: str | None, count: int) -> int:
    """Cases that have to pass: of "N", or of "P%" rounded up. Raises UsageError."""
    found = re.fullmatch(r"(\d+)(%?)", text or "0", re.ASCII)
    if not found or int(found[1]) > (100 if found[2] else count):
        raise UsageError(f"--min-pass is {str(text)[:40]!r}, need a number from 0 to {count}, or 0% to 100%")
    return -(-count * int(found[1]) // 100) if found[2] else int(found[1])


def report(args: Namespace, records: Sequence[Record], asked: int) -> int:
    """Print it, write --json, and return 0, or 3 where --min-pass is not met. `asked`: cases that were to be."""
    print_tables(tables(records) if records else [])
    passed, needed = sum(r.grade.verdict == "passed" for r in records), least(args.min_pass, asked)
    print(f"{passed} of {asked} passed")
    if args.json:
        _write(Path(args.json), {"source": "ds4mlx", "cases": asked, "graded": len(records), "passed": passed,
                                 "min_pass": needed, "results": [_result(r) for r in records]})
    if passed < needed:
        print(f"--min-pass: {passed} passed, need {needed}")
        return UNMET
    return 0


def _result(r: Record) -> dict[str, object]:
    return {"id": r.case.id, "source": r.case.source, "domain": r.case.domain, "verdict": r.grade.verdict,
            "given": r.grade.given, "expected": r.grade.expected, "prompt_tokens": r.prompt_tokens,
            "tokens": r.tokens, "seconds": r.seconds, "end": r.end, "closed": r.closed, "tries": r.tries}


def _write(path: Path, whole: dict[str, object]) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(whole, ensure_ascii=False, indent=2) + "\n", "utf-8", "backslashreplace")
        os.replace(partial, path)
    except OSError as fault:
        raise Ds4Error(f"--json {path}: {fault.strerror}; give a path that can be written") from fault


def regrade(args: Namespace) -> int:
    """The report of a trace, its answers graded as they are today; what changed is named."""
    before = read_trace(Path(args.regrade_trace))
    least(args.min_pass, len(before))
    after = [replace(r, grade=grade(r.case, r.said, args.compat_grading)) for r in before]
    code = report(args, after, len(after))
    for old, new in zip(before, after, strict=True):
        if old.grade.verdict != new.grade.verdict:
            print(f"{new.case.id}: {old.grade.verdict} before, {new.grade.verdict} by this grading")
    return code
