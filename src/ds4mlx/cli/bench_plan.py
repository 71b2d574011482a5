"""`ds4mlx bench --plan`: what a decoded token costs a GPU, counted kernel by kernel without one."""
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from ds4mlx.cli.model import resolve_model
from ds4mlx.cli.options import settings_from
from ds4mlx.cli.tables import Table, print_tables
from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from ds4mlx.engine.mlx_plan import Cost, Plan

MB = 1e6


def count(args: Namespace) -> int:
    """Print to standard output. Raises UsageError, ModelFileError, EmulatorError."""
    plan = _plan(args)
    if args.json is not None:
        print(json.dumps(_as_json(plan), indent=2))
    else:
        print_tables(tables(plan))
    return 0


def _plan(args: Namespace) -> "Plan":
    context = settings_from(args).ctx if args.ctx else 4096
    from ds4mlx.engine import mlx_plan
    from ds4mlx.models.deepseek_v4.config import FLASH, PRO
    named = {"FLASH": FLASH, "PRO": PRO}.get((args.model or "FLASH").upper())
    if named is not None:
        return mlx_plan.decode_plan(named, mlx_plan.published_kinds(named, args.quant or "q2"), context, _told)
    if args.quant:
        raise UsageError(f"--quant {args.quant}: {args.model} has types of its own; --quant goes with FLASH and PRO")
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.models.registry import family_of
    with GGUF.open(resolve_model(settings_from(args))) as file:
        config = family_of(file.metadata).role("names").validate(file)
        return mlx_plan.decode_plan(config, mlx_plan.file_kinds(file, config), context, _told)


def _told(layer: str) -> None:
    print(f"counting {layer} …", file=sys.stderr)


def tables(plan: "Plan") -> Iterator[Table]:
    """One of each kind of layer, then the sums."""
    head = ["kernel", "launches", "read MB", "written MB", "least MB", "ratio", "again from cache MB"]
    for layer in plan.layers:
        title = f"{layer.name}: {layer.count} of them, {layer.launches} launches each"
        yield Table(title, head, [_row(cost) for cost in layer.costs])
    moved = plan.total("read_bytes") + plan.total("written_bytes")
    launches = sum(layer.count * layer.launches for layer in plan.layers)
    yield Table(f"A token at the end of {plan.context:,}", ["", "MB"], [
        ["weights that it needs", f"{plan.weight_bytes / MB:,.1f}"],
        ["rows of the cache that it needs", f"{plan.row_bytes / MB:,.1f}"],
        ["read", f"{plan.total('read_bytes') / MB:,.1f}"],
        ["written", f"{plan.total('written_bytes') / MB:,.1f}"],
        [f"moved, {plan.ratio:.3f} of what it needs, in {launches:,} launches", f"{moved / MB:,.1f}"]])


def _row(cost: "Cost") -> list[str]:
    numbers = (cost.read_bytes, cost.written_bytes, cost.least_bytes)
    ratio = (cost.read_bytes + cost.written_bytes) / cost.least_bytes if cost.least_bytes else None
    if ratio is None:   # an operation of MLX's own, of a row or less
        return [cost.name, str(cost.launches), *[""] * 5]
    return [cost.name, str(cost.launches), *(f"{n / MB:,.3f}" for n in numbers), f"{ratio:.3f}",
            f"{cost.cached_bytes / MB:,.3f}"]


def _as_json(plan: "Plan") -> dict[str, object]:
    return asdict(plan) | {"read_bytes": plan.total("read_bytes"), "written_bytes": plan.total("written_bytes"),
                           "ratio": plan.ratio}
