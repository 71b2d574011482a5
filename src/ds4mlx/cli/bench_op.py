"""`ds4mlx bench --op`: what products of a layer reach on a CUDA card, beside what the card does at best."""
from argparse import Namespace

from ds4mlx.errors import UsageError

NAMES = "attention-in", "queries", "output-a", "output-b", "router", "experts"
TOKENS = 1, 16, 2048
MOST_TOKENS = 8192


def measure(args: Namespace) -> int:
    """Prints a table for each number of tokens; 0. Raises Ds4Error."""
    if args.op not in (*NAMES, "all"):
        raise UsageError(f"--op is {args.op[:40]!r}, need one of {', '.join(NAMES)}, or all")
    if args.engine != "cuda":
        raise UsageError("--op measures kernels on a CUDA card; need --engine cuda (--plan counts those of MLX)")
    from ds4mlx.cli.bench import whole
    from ds4mlx.cli.tables import Table, print_tables
    tokens = [whole(n, "--op-tokens", 1, MOST_TOKENS) for n in args.op_tokens.split(",")] if args.op_tokens else TOKENS
    from ds4mlx.cuda_port import op_speed
    best = op_speed.ceilings()
    head = ["", "MB", "us", "TB/s", "of a copy", "TFLOP/s", "of a GEMM"]
    for count in tokens:
        rows, total = [], 0.0
        for found in op_speed.measured(args.op, count):
            read, done = found.bytes / found.seconds, found.operations / found.seconds
            rows.append([found.name, f"{found.bytes / 1e6:.1f}", f"{found.seconds * 1e6:.1f}", f"{read / 1e12:.2f}",
                         f"{read / best.copy:.0%}", f"{done / 1e12:.1f}", f"{done / best.product:.0%}"])
            total += found.seconds
        print_tables([Table(f"{count} tokens: {total * 1e6:.0f} us; a copy moves {best.copy / 1e12:.2f} TB/s, a GEMM "
                            f"of halves does {best.product / 1e12:.0f} TFLOP/s", head, rows)])
    return 0
