"""Speed against context as a picture, with the limit that the machine's memory sets. Needs matplotlib."""
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli.bench_measure import Frontier
from ds4mlx.errors import Ds4Error, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ds4mlx.cli.bench_limit import Limit

FORMATS = (".png", ".svg")
INCHES, DOTS = (9.0, 3.8), 150
TICKS = 6       # at most, of contexts


def check(path: Path) -> None:
    """Raises UsageError before anything is measured, rather than after."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot is {str(path)!r}, need a name that ends in {' or '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed; pip install 'ds4mlx[plot]'") from None
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")


def plot(path: Path, series: Mapping[str, Sequence[Frontier]], title: str, limit: "Limit | None" = None) -> None:
    """One line a series in each of two axes. `limit` is that of the first series. Raises Ds4Error."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    figure = Figure(INCHES, DOTS, layout="constrained")
    prefill, decode = figure.subplots(1, 2)
    for name, rows in series.items():
        context = [row.ctx_tokens for row in rows]
        prefill.plot(context, [row.prefill_tps for row in rows], marker="o", markersize=3, label=name)
        if any(row.gen_tokens for row in rows):
            decode.plot(context, [row.gen_tps for row in rows], marker="o", markersize=3, label=name)
    if limit is not None:
        context = [row.ctx_tokens for row in next(iter(series.values()))]
        decode.plot(context, limit.tps[:len(context)], linestyle="--", color="0.4",
                    label=f"one session at {limit.gb_s:,.0f} GB/s ({limit.source})")
    _label(prefill, "prefill of the last interval")
    _label(decode, "generation")
    figure.suptitle(title, fontsize=10)
    try:
        kind = path.suffix[1:].lower()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds4mlx"}):    # text stays text, names do not change
            figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)
    except OSError as fault:
        raise Ds4Error(f"--plot {path}: {fault.strerror}; the numbers are in the CSV, and --compare draws them "
                       "again") from fault


def _label(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import MultipleLocator
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    first, last = axes.get_xlim()
    axes.xaxis.set_major_locator(MultipleLocator(max(1, 2 ** math.ceil(math.log2((last - first) / TICKS)))))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value % 1024 or not value else f"{value / 1024:g}k")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
