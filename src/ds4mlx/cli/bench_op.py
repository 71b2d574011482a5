"""`ds4mlx bench --op`: what products of a layer reach on a CUDA card, beside what the card does at best."""
from argparse import Namespace
from collections.abc import Iterable

from ds4mlx.errors import UsageError

NAMES = "attention-in", "queries", "output-a", "output-b", "router", "experts"
SAMPLE = "sample"       # what follows a step, and no product: a token of each row of logits
TOKENS = 1, 16, 2048
MOST_TOKENS, MOST_ROWS = 8192, 16


def measure(args: Namespace) -> int:
    """Prints a table for each number of tokens; 0. Raises Ds4Error."""
    if args.op not in (*NAMES, SAMPLE, "all"):
        raise UsageError(f"--op is {args.op[:40]!r}, need one of {', '.join((*NAMES, SAMPLE))}, or all")
    if args.engine != "cuda":
        raise UsageError("--op measures kernels on a CUDA card; need --engine cuda (--plan counts those of MLX)")
    from ds4mlx.cli.bench import whole
    most = MOST_ROWS if args.op == SAMPLE else MOST_TOKENS
    tokens = [whole(n, "--op-tokens", 1, most) for n in args.op_tokens.split(",")] if args.op_tokens else \
        [n for n in TOKENS if n <= most]
    if args.op == SAMPLE:
        _sampling(tokens)
    else:
        _products(args.op, tokens)
    return 0


def _products(name: str, tokens: Iterable[int]) -> None:
    from ds4mlx.cli.tables import Table, print_tables
    from ds4mlx.cuda_port import op_speed
    best = op_speed.ceilings()
    head = ["", "MB", "us", "TB/s", "of a copy", "TFLOP/s", "of a GEMM"]
    for count in tokens:
        rows, total = [], 0.0
        for found in op_speed.measured(name, count):
            read, done = found.bytes / found.seconds, found.operations / found.seconds
            rows.append([found.name, f"{found.bytes / 1e6:.1f}", f"{found.seconds * 1e6:.1f}", f"{read / 1e12:.2f}",
                         f"{read / best.copy:.0%}", f"{done / 1e12:.1f}", f"{done / best.product:.0%}"])
            total += found.seconds
        print_tables([Table(f"{count} tokens: {total * 1e6:.0f} us; a copy moves {best.copy / 1e12:.2f} TB/s, a GEMM "
                            f"of halves does {best.product / 1e12:.0f} TFLOP/s", head, rows)])


def _sampling(tokens: Iterable[int]) -> None:
    from ds4mlx.cli.tables import Table, print_tables
    from ds4mlx.cuda_port import op_speed
    for count in tokens:
        rows = [[found.name, f"{found.seconds * 1e6:.1f}"] for found in op_speed.drawn(count)]
        print_tables([Table(f"{count} of {op_speed.VOCABULARY:,} tokens at a time", ["", "us"], rows)])
