"""`ds4mlx doctor`: whether a model will run on this machine. With --kernels it tries every Metal kernel and writes a
report that can be sent on."""
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx import __version__
from ds4mlx.cli.options import settings_from
from ds4mlx.cli.tables import Table, print_tables
from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.cli.checkup import Finding
    from ds4mlx.engine.mlx_kernels import Difference, Implementation, Machine, Result

REPORT = "ds4mlx-kernels-report.json"
FORMAT = 1
EMULATOR = "--ops metal-emulated runs the same kernels in an emulator on any machine that has clang"


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "doctor", allow_abbrev=False, help="look for what keeps a model from running here",
        description="Device, memory, model file, disk, port and clients, with what to do where something is wrong. "
                    "With --kernels: compiles every Metal kernel on this machine's GPU, compares it with the reference "
                    "on the CPU, times it against the bandwidth of the chip, and writes a report; that takes some "
                    "minutes and needs no model file.")
    parser.add_argument("-m", "--model", metavar="FILE", help="GGUF file, or tiny (as for every command)")
    parser.add_argument("-c", "--ctx", metavar="N", help="context that is to fit, in tokens (32768)")
    parser.add_argument("--batched-session", metavar="N", help="slots that are to fit (1)")
    parser.add_argument("--port", metavar="N", help="port that is to be free (8000)")
    parser.add_argument("--sha256", metavar="SUM", nargs="?", const="",
                        help="read all of the model file, and compare its sum with this one or show it")
    parser.add_argument("--kernels", action="store_true", help="try the kernels")
    parser.add_argument("--report", metavar="FILE", help=f"where the report goes ({REPORT})")
    parser.add_argument("--small", action="store_true", help="small sizes; always so in the emulator")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases that have TEXT in their name")
    parser.add_argument("--json", action="store_true", help="findings or report as JSON, instead of a table")
    parser.add_argument("--ops", metavar="metal|metal-emulated", help="on the GPU or in the emulator (metal)")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """0 if all is well, else 1. Raises UsageError without Metal, or where a report is already."""
    if not args.kernels:
        return _examine(args)
    if args.sha256 is not None:
        raise UsageError("--sha256 is of the model file, which --kernels does without; give one of them")
    from ds4mlx.engine import mlx_kernels
    implementation = _implementation(settings_from(args).ops, mlx_kernels.has_metal())
    path = _free(Path(args.report or REPORT))
    sizes = "small" if args.small or implementation == "metal-emulated" else "flash"
    names = mlx_kernels.names(sizes, args.only)
    if not names:
        raise UsageError(f"--only {args.only}: no case has that in its name; one is 'latent: 1 token behind 0'")
    machine, results = mlx_kernels.machine(implementation), []
    for number, result in enumerate(mlx_kernels.check_all(sizes, implementation, args.only), 1):
        print(f"{number}/{len(names)} {_line(result)}", file=sys.stderr, flush=True)
        results.append(result)
    failed = sum(not result.passed for result in results)
    text = json.dumps({"format": FORMAT, "ds4mlx": __version__, "ops": implementation, "sizes": sizes,
                       "only": args.only, "machine": asdict(machine), "failed": failed,
                       "cases": [_as_json(result, machine) for result in results]}, indent=1, allow_nan=False)
    with path.open("x", encoding="utf-8") as file:
        file.write(f"{text}\n")
    if args.json:
        print(text)
    else:
        print_tables([table(results, machine)])
        for result in results:
            if not result.passed:
                print(f"\n{result.name}: FAILED, {_why(result)}")
    print(closing(len(results), failed, implementation, path), file=sys.stderr)
    return 1 if failed else 0


def _examine(args: Namespace) -> int:
    from ds4mlx.cli.checkup import examine
    for option in ("report", "small", "only"):
        if getattr(args, option):
            raise UsageError(f"--{option} is for --kernels")
    findings = list(examine(settings_from(args), args.sha256))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False, indent=1))
    else:
        _print_findings(findings)
    return int(any(finding.verdict == "wrong" for finding in findings))


def _print_findings(findings: "Sequence[Finding]") -> None:
    """Whole sentences, which a table would break."""
    from ds4mlx.config import color_wanted
    color = color_wanted("auto", sys.stdout.isatty())
    for finding in findings:
        style = {"ok": "\x1b[32m", "note": "\x1b[33m", "wrong": "\x1b[31m"}[finding.verdict]
        verdict = f"{style}{finding.verdict:5}\x1b[0m" if color else f"{finding.verdict:5}"
        print(f"{verdict}  {finding.what:8}  {finding.told}")


def _implementation(ops: str, metal: bool) -> "Implementation":
    if ops == "metal-emulated":
        return "metal-emulated"
    if ops not in ("auto", "metal"):
        raise UsageError(f"--ops {ops} has no Metal kernels, need metal or metal-emulated")
    if not metal:
        raise UsageError(f"no Metal device here, need a Mac with Apple silicon; {EMULATOR}")
    return "metal"


def _free(path: Path) -> Path:
    """Known before minutes of work, not after. Raises UsageError."""
    if path.exists():
        raise UsageError(f"{path} is there already; move it away, or give another name with --report FILE")
    if not path.parent.is_dir():
        raise UsageError(f"--report {path}: no folder {path.parent}; make it first")
    return path


def _as_json(result: "Result", machine: "Machine") -> dict[str, object]:
    return asdict(result) | {"gb_s": result.gb_s, "share_of_copy": _share(result, machine)}


def _share(result: "Result", machine: "Machine") -> float | None:
    return result.gb_s / machine.copy_gb_s if result.gb_s and machine.copy_gb_s else None


def _line(result: "Result") -> str:
    """For who waits: the case and how it went."""
    if result.passed:
        time = f", {result.microseconds:.1f} us, {result.gb_s:.0f} GB/s" if result.microseconds else ""
        return f"{result.name}: ok, {_shown(result.worst)}{time}"
    return f"{result.name}: FAILED, {_why(result)}"


def _why(result: "Result") -> str:
    worst = result.worst
    if worst is None:
        return result.fault
    return f"{_shown(worst)}, allowed {_number(worst.tolerance)}{f': {worst.note}' if worst.note else ''}"


def _shown(d: "Difference | None") -> str:
    if d is None or d.error is None:
        return "not finite" if d else ""
    return f"{_number(d.error)} {d.unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1e}"


def table(results: "Sequence[Result]", machine: "Machine") -> Table:
    head = ["case", "largest error", "allowed", "us", "GB/s", "of a copy's", "verdict"]
    return Table(f"Metal kernels on {_bandwidth(machine)}", head, [_row(result, machine) for result in results])


def _row(result: "Result", machine: "Machine") -> list[str]:
    worst, share = result.worst, _share(result, machine)
    return [result.name, _shown(worst), _number(worst.tolerance) if worst else "",
            f"{result.microseconds:.1f}" if result.microseconds else "", f"{result.gb_s:.0f}" if result.gb_s else "",
            f"{share:.0%}" if share else "", "ok" if result.passed else "FAILED"]


def _bandwidth(machine: "Machine") -> str:
    if machine.copy_gb_s is None:
        return f"{machine.device}, emulated"
    published = f", {machine.published_gb_s} published" if machine.published_gb_s else ""
    return f"{machine.device}: a copy moves {machine.copy_gb_s:.0f} GB/s{published}"


def closing(cases: int, failed: int, implementation: "Implementation", path: Path) -> str:
    """What to do with the report."""
    outcome = f"{failed} of {cases} cases failed" if failed else f"all {cases} cases passed"
    if implementation == "metal-emulated":
        return (f"{outcome} in the emulator; the report is {path}. It says nothing of a GPU: ds4mlx doctor --kernels "
                "on a Mac does")
    return (f"{outcome}; the report is {path}. Please send it to the project, passed or failed: attach it to an issue. "
            "It holds the chip's name and memory, versions of macOS and MLX and the numbers above, nothing of yours")
