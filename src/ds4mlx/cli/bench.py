"""`ds4mlx bench`: how fast prefill and decoding are at growing contexts, and what a token costs by count.

Not to be compared with each other: a first measurement (from an empty state) and one that goes on from a frontier;
tokens per second of several sessions together and of one; a decoded probe and a --teacher-forced-decode one.
"""
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.cli.bench_measure import Sweep

MOST = 1 << 24      # tokens of a context
INTERRUPTED = 130
PAIR = 2


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags
    parser = subparsers.add_parser(
        "bench", allow_abbrev=False, help="measure speed at growing contexts, or count what a token costs",
        description="A text is computed from frontier to frontier; at each, the added interval is timed, then a probe "
                    "of greedy tokens that never ends, after which the state goes back. CSV on standard output. Do not "
                    "compare the first frontier with later ones, sums of --concurrency with one session, or probes "
                    "with --teacher-forced-decode.")
    _add_sweep_flags(parser.add_argument_group("what is measured"))
    _add_output_flags(parser.add_argument_group("output"))
    count = parser.add_argument_group("counting instead, or one product")
    count.add_argument("--plan", action="store_true",
                       help="launches and bytes of one token, kernel by kernel, in the emulator: needs clang, no GPU "
                            "and no model file")
    count.add_argument("--op", metavar="NAME", help="with --engine cuda: what one product of a layer, or all of them, "
                       "reach on the card, beside its own best; or sample, a token drawn; needs no model file")
    count.add_argument("--op-tokens", metavar="N,N", help="--op: of so many tokens (1,16,2048; sample: 1,16)")
    count.add_argument("--quant", choices=("q2", "q4", "mxfp4"), help="--plan: routed experts of FLASH and PRO (q2)")
    add_engine_flags(parser)
    told = {"model": "GGUF file, or tiny; with --plan FLASH or PRO too",
            "ctx": "--plan: at the end of so many tokens (4096)"}
    for action in parser._actions:
        action.help = told.get(action.dest, action.help)
    parser.set_defaults(run=run)


def _add_sweep_flags(group: ArgumentParser) -> None:
    group.add_argument("--prompt-file", metavar="FILE", help="the text, as it is; - reads standard input")
    group.add_argument("--chat-prompt-file", metavar="FILE", help="the text as a user's message, without reasoning")
    group.add_argument("-sys", "--system", metavar="TEXT", help="its system text; empty for none")
    group.add_argument("--ctx-start", metavar="N", default="2048", help="first frontier (2048)")
    group.add_argument("--ctx-max", metavar="N", default="32768", help="last one (32768)")
    group.add_argument("--step-incr", metavar="N", default="2048", help="tokens from one to the next (2048)")
    group.add_argument("--step-mul", metavar="F", default="1", help="above 1: a factor instead (1)")
    group.add_argument("--ctx-alloc", metavar="N", help="context of a session (ctx-max + gen-tokens + 1)")
    group.add_argument("--gen-tokens", metavar="N", default="128", help="tokens of a probe; 0: prefill only (128)")
    group.add_argument("--teacher-forced-decode", action="store_true", help="feed the text's tokens to the probe")
    group.add_argument("--repeat", metavar="N", default="1", help="measure each frontier so often, show medians (1)")
    group.add_argument("--warmup", metavar="N", default="256", help="tokens computed first and thrown away (256)")
    group.add_argument("--concurrency", metavar="N", default="1", help="sessions that decode together, 1 to 16 (1)")


def _add_output_flags(group: ArgumentParser) -> None:
    group.add_argument("--csv", metavar="FILE", help="rows there, and none to standard output")
    group.add_argument("--overwrite", action="store_true", help="replace a CSV file that is there")
    group.add_argument("--json", metavar="FILE", nargs="?", const="-",
                       help="also one object with machine, model and all measurements; --plan: to standard output")
    group.add_argument("--plot", metavar="FILE", help="draw it as FILE.png or FILE.svg (needs matplotlib)")
    group.add_argument("--bandwidth-gb-s", metavar="F", help="of the memory, for the limit that is drawn (by machine)")
    group.add_argument("--dump-frontier-logits-dir", metavar="DIR", help="the logits at each frontier, as JSON")
    group.add_argument("--compare", nargs=PAIR, metavar=("A.csv", "B.csv"), help="show two files side by side")


def run(args: Namespace) -> int:
    """0, or 130 when interrupted. Raises Ds4Error."""
    if args.plan:
        from ds4mlx.cli.bench_plan import count
        return count(args)
    if args.op:
        from ds4mlx.cli.bench_op import measure
        return measure(args)
    if args.compare:
        return _compare(args)
    if args.quant or args.ctx:
        raise UsageError(f"{'--quant' if args.quant else '--ctx'} goes with --plan; --ctx-alloc is the context of a "
                         "measurement")
    sweep = _sweep(args)
    if args.plot:
        from ds4mlx.cli.bench_plot import check
        check(Path(args.plot))
    if args.json == "-":
        raise UsageError("--json needs a file: standard output has the CSV")
    writable(args.json, "--json")
    from ds4mlx.cli.bench_run import measured
    return measured(args, sweep)


def _compare(args: Namespace) -> int:
    from ds4mlx.cli import bench_compare, bench_plot
    from ds4mlx.cli.bench_record import read_csv
    from ds4mlx.cli.tables import print_tables
    if args.plot:
        bench_plot.check(Path(args.plot))
    names = Path(args.compare[0]), Path(args.compare[1])
    first, second = map(read_csv, names)
    print_tables(bench_compare.tables(names, bench_compare.pairs(first, second)))
    if args.plot:
        bench_plot.plot(Path(args.plot), {f"A: {names[0].name}": first, f"B: {names[1].name}": second}, "A and B")
    return 0


def _sweep(args: Namespace) -> "Sweep":
    """Raises UsageError for what cannot be measured."""
    from ds4mlx.cli.bench_measure import Sweep, frontiers
    if (args.prompt_file is None) == (args.chat_prompt_file is None):
        raise UsageError("nothing to measure on, or two texts; need one of --prompt-file, --chat-prompt-file; --plan "
                         "counts the launches and bytes of a token, --compare shows two files")
    if args.system is not None and args.chat_prompt_file is None:
        raise UsageError("--system goes with --chat-prompt-file")
    start, most = whole(args.ctx_start, "--ctx-start", 1), whole(args.ctx_max, "--ctx-max", 1)
    incr, mul = whole(args.step_incr, "--step-incr", 0), number(args.step_mul, "--step-mul", 1, 1e6)
    gen = whole(args.gen_tokens, "--gen-tokens", 0)
    alloc = most + gen + 1 if args.ctx_alloc is None else whole(args.ctx_alloc, "--ctx-alloc", 1)
    if start > most:
        raise UsageError(f"--ctx-start is {start}, need at most --ctx-max, {most}")
    if mul == 1 and incr == 0:
        raise UsageError("--step-incr is 0, need 1 at least, or --step-mul above 1")
    if alloc <= most + gen:
        raise UsageError(f"--ctx-alloc is {alloc}, need more than --ctx-max and --gen-tokens together, {most + gen}")
    return Sweep(frontiers(start, most, incr, mul), alloc, gen, whole(args.repeat, "--repeat", 1, 1000),
                 whole(args.warmup, "--warmup", 0), whole(args.concurrency, "--concurrency", 1, 16),
                 args.teacher_forced_decode)


def whole(text: str, option: str, low: int, high: int = MOST) -> int:
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise UsageError(f"{option} is {text[:40]!r}, need a whole number from {low} to {high}")
    return int(text)


def number(text: str, option: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UsageError(f"{option} is {text[:40]!r}, need a number from {low:g} to {high:g}")
    return value


def writable(name: str | None, option: str) -> None:
    """Raises UsageError where no file can be put, before hours of work rather than after."""
    if name is None:
        return
    path = Path(name).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {name}: no file can be written there; give a path in a folder of yours")
