"""`ds4mlx bench --compare A.csv B.csv`: the second over the first, frontier by frontier."""
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from ds4mlx.cli.bench_measure import Frontier
from ds4mlx.cli.tables import Table
from ds4mlx.errors import Ds4Error

Pair = tuple[Frontier, Frontier]


def pairs(first: Sequence[Frontier], second: Sequence[Frontier]) -> list[Pair]:
    """Rows of the same frontier. Raises Ds4Error when there is none."""
    known = {row.ctx_tokens: row for row in second}
    found = [(row, known[row.ctx_tokens]) for row in first if row.ctx_tokens in known]
    if not found:
        raise Ds4Error("--compare: no frontier is in both files; measure both with the same --ctx-start, --ctx-max "
                       "and steps")
    return found


def tables(names: tuple[Path, Path], found: Sequence[Pair]) -> list[Table]:
    """A: the first file, B: the second."""
    rows = [_cells(a, b) for a, b in found]
    prefill = _mean((a.prefill_tps, b.prefill_tps) for a, b in found if a.prefill_tokens == b.prefill_tokens)
    decode = _mean((a.gen_tps, b.gen_tps) for a, b in found)
    told = Table(f"A: {names[0]}   B: {names[1]}", ["context", "prefill A", "B", "B/A", "generation A", "B", "B/A"],
                 [*rows, ["mean of B/A", "", "", prefill, "", "", decode]])
    odd = [a for a, b in found if a.prefill_tokens != b.prefill_tokens]
    return [told, *([Table("Not compared", ["prefill of"], [[f"{row.ctx_tokens:,}: the intervals differ in length"]
                                                            for row in odd])] if odd else [])]


def _cells(a: Frontier, b: Frontier) -> list[str]:
    prefill = _ratio(a.prefill_tps, b.prefill_tps) if a.prefill_tokens == b.prefill_tokens else ""
    return [f"{a.ctx_tokens:,}", f"{a.prefill_tps:.2f}", f"{b.prefill_tps:.2f}", prefill,
            f"{a.gen_tps:.2f}", f"{b.gen_tps:.2f}", _ratio(a.gen_tps, b.gen_tps)]


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.3f}" if a > 0 else ""


def _mean(rates: Iterable[tuple[float, float]]) -> str:
    ratios = [b / a for a, b in rates if a > 0 and b > 0]
    return f"{geometric_mean(ratios):.3f}" if ratios else ""
