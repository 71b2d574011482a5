"""`ds4mlx quantize`: a checkpoint in safetensors to a GGUF; `quantize imatrix`: what a model's columns count."""
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli import imatrix
from ds4mlx.cli.tables import Table, aligned, print_tables, size
from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.quant.measure import Comparison
    from ds4mlx.quant.plan import Plan, Planned

CONTEXTS = (8192, 32768, 131072, 1048576)   # whose memory --dry-run shows
FAMILIES = ("experts", "routed_w2", "attention", "shared", "output")
MOST_THREADS = 1024


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "quantize", allow_abbrev=False, help="make a GGUF from a checkpoint in safetensors",
        usage="ds4mlx quantize --src DIR --out FILE.gguf [OPTIONS]\n       ds4mlx quantize imatrix [OPTIONS]",
        description="Tensor by tensor, in about 1 GB of memory. A conversion that was stopped goes on with --resume.")
    parser.add_argument("--src", metavar="DIR", help="checkpoint: config.json, tokenizer.json, *.safetensors")
    parser.add_argument("--out", metavar="FILE", help="the GGUF to write")
    parser.add_argument("--recipe", metavar="NAME|FILE.toml", default="q2",
                        help="q2, q2-q4, q4, q8, f16, native or a file of types (q2)")
    parser.add_argument("--imatrix", metavar="FILE", help="how much columns count, .dat or GGUF of llama.cpp")
    parser.add_argument("--name", metavar="NAME", help="of the checkpoint, for the file (the name of DIR)")
    for family, what in zip(FAMILIES, ("routed experts", "their down matrices", "attention matrices",
                                       "the shared expert", "the output matrix")):
        parser.add_argument(f"--{family.replace('_', '-')}", metavar="TYPE", help=f"type of {what}, as Q4_K")
    parser.add_argument("--threads", metavar="N", help="processors to use (all)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be written, and write nothing")
    parser.add_argument("--compare-tensor", metavar="NAME", help="encode one tensor only, show its error, and compare "
                        "it with --out if that is there")
    parser.add_argument("--resume", action="store_true", help="go on with a conversion that was stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--verify", action="store_true", help="read the file back and compare rows of every matrix; "
                        "where it is there already, do only that")
    parser.add_argument("--json", action="store_true", help="one JSON object, with --dry-run or --compare-tensor")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", prog="ds4mlx quantize")
    imatrix.add_action(actions)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Raises UsageError, ModelFileError."""
    if args.action == "imatrix":
        return imatrix.run(args)
    source, out, threads = _checked(args)
    plan = _plan(args, source)
    if args.compare_tensor is not None:
        return _compare(plan, args.compare_tensor, out, threads, args.json)
    if args.dry_run:
        return _show(plan, args.json)
    if not (args.verify and out.exists() and not (args.overwrite or args.resume)):
        from ds4mlx.quant.conversion import convert
        _tell_speed(plan)
        try:
            with _progress(plan) as progress:
                convert(plan, out, resume=args.resume, overwrite=args.overwrite, threads=threads, progress=progress)
        except KeyboardInterrupt:
            print(f"{out}: stopped; what is written stays, --resume goes on with it", file=sys.stderr)
            raise
        print(f"{out}: {size(out.stat().st_size)}, {len(plan.tensors)} tensors", file=sys.stderr)
    if args.verify:
        from ds4mlx.quant.measure import verify
        print(f"{out}: {verify(plan, out)} rows compared, all within what their types lose", file=sys.stderr)
    return 0


def _checked(args: Namespace) -> tuple[Path, Path | None, int | None]:
    if args.src is None:
        raise UsageError("--src is missing: the directory of the checkpoint")
    if args.out is None and not (args.dry_run or args.compare_tensor):
        raise UsageError("--out is missing: the GGUF to write, or give --dry-run")
    if args.resume and args.overwrite:
        raise UsageError("--resume goes on with what is there and --overwrite replaces it; give one of them")
    threads = None
    if args.threads is not None:
        if not args.threads.isdecimal() or not 1 <= int(args.threads[:9]) <= MOST_THREADS:
            raise UsageError(f"--threads is {args.threads[:40]!r}, need a whole number from 1 to {MOST_THREADS}")
        threads = int(args.threads)
    return Path(args.src), None if args.out is None else Path(args.out), threads


def _plan(args: Namespace, source: Path) -> "Plan":
    from ds4mlx.quant import importance
    from ds4mlx.quant.checkpoint import Checkpoint
    from ds4mlx.quant.plan import checkpoint_name, make_plan
    from ds4mlx.quant.recipe import recipe
    chosen = recipe(args.recipe, {family: getattr(args, family) for family in FAMILIES})
    weighed = None if args.imatrix is None else importance.read(Path(args.imatrix))
    plan = make_plan(Checkpoint(source), chosen, weighed, args.name or checkpoint_name(source))
    if weighed is not None and plan.unweighed:
        print(f"{args.imatrix}: nothing for {len(plan.unweighed)} matrices, {plan.unweighed[0]} first; their columns "
              "count evenly", file=sys.stderr)
    return plan


def _tell_speed(plan: "Plan") -> None:
    from ds4mlx.quant import compiled
    from ds4mlx.quant.encode import SEARCHED
    if not compiled.built() and any(tensor.kind in SEARCHED for tensor in plan.tensors):
        print("search.cpp is not built: NumPy searches, sixty times slower; install again with a C++ compiler",
              file=sys.stderr)


# ---- --dry-run

def _show(plan: "Plan", as_json: bool) -> int:
    from ds4mlx.models.deepseek_v4 import schema
    contexts = [c for c in CONTEXTS if c <= plan.checkpoint.config.max_position_embeddings]
    weights = sum(tensor.nbytes for tensor in plan.tensors)
    memory = {c: weights + schema.session_bytes(plan.checkpoint.config, c, packed=True) for c in contexts}
    if as_json:
        tensors = [{"name": t.name, "type": t.kind, "shape": t.shape, "bytes": t.nbytes, "from": t.parts[0].form,
                    "weighed": _weighed(plan, t)} for t in plan.tensors]
        print(json.dumps({"recipe": plan.metadata["ds4mlx.recipe"], "file_bytes": plan.layout.nbytes,
                          "tensors": tensors, "memory_bytes": memory}, indent=1))
        return 0
    print_tables([
        Table(f"Tensors of recipe {plan.metadata['ds4mlx.recipe']}",
              ["tensor", "from", "type", "shape", "imatrix", "size"],
              [[t.name, t.parts[0].form, t.kind, " x ".join(map(str, t.shape)), "yes" if _weighed(plan, t) else "",
                size(t.nbytes)] for t in plan.tensors]),
        Table(f"The file would have {size(plan.layout.nbytes)}; a full session beside its weights needs", [
            "context", "memory"], [[f"{c:,}", size(nbytes)] for c, nbytes in memory.items()])])
    return 0


def _weighed(plan: "Plan", tensor: "Planned") -> bool:
    return plan.importance_of(tensor, 0) is not None


# ---- --compare-tensor

def _compare(plan: "Plan", name: str, out: Path | None, threads: int | None, as_json: bool) -> int:
    from ds4mlx.quant.measure import compare
    found = compare(plan, name, out, threads)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print(*aligned(_told(found, out), right=False), sep="\n")
    return 0


def _told(found: "Comparison", out: Path | None) -> Iterator[list[str]]:
    yield ["tensor", f"{found.name}, {found.weights:,} weights as {found.kind}"]
    yield ["mean square error", f"{found.mean_square_error:.6g}"]
    yield ["relative error", f"{found.relative_error:.4%}"]
    yield ["weighed by importance", f"{found.weighted_relative_error:.4%}"]
    yield ["largest error", f"{found.largest_error:.6g}"]
    if found.different_blocks is not None:
        yield [f"beside {out}", "the same bytes" if not found.different_blocks else
               f"{found.different_blocks:,} of {found.blocks:,} blocks differ"]


# ---- progress

@contextmanager
def _progress(plan: "Plan") -> "Iterator[Callable[[Planned, int], None]]":
    """A bar on a terminal; elsewhere a line on standard error for each layer."""
    if not sys.stderr.isatty():
        yield _Lines(plan)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, markup=False, highlight=False), transient=True) as bar:
        task = bar.add_task("", total=sum(tensor.nbytes for tensor in plan.tensors))
        yield lambda tensor, nbytes: bar.update(task, advance=nbytes, description=f"{tensor.name} {tensor.kind}")


class _Lines:
    """Progress where no bar can be."""

    def __init__(self, plan: "Plan") -> None:
        self.total, self.done, self.last = sum(tensor.nbytes for tensor in plan.tensors), 0, ""

    def __call__(self, tensor: "Planned", nbytes: int) -> None:
        self.done += nbytes
        layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "above the layers"
        if layer != self.last:
            self.last = layer
            told = f"{self.done / self.total:4.0%} {size(self.done)} of {size(self.total)}, {tensor.name}"
            print(told, file=sys.stderr)
