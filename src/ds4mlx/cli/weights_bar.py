"""The bar of a model's weights on their way to a card."""
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

REFRESHES_S = 5


class WeightsBar:
    """Bytes that are there, and their speed, on standard error: gone when all are there."""

    def __init__(self, color: bool) -> None:
        self._color = color
        self._bar: "Bar | None" = None
        self._task: "TaskID | None" = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._open(total)
        self._bar.update(self._task, completed=done)
        if done >= total:
            self._bar.stop()
            self._bar = None

    def _open(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
        console = Console(stderr=True, no_color=not self._color, highlight=False)
        self._bar = Bar(TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                        TimeRemainingColumn(compact=True), console=console, transient=True,
                        refresh_per_second=REFRESHES_S, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("weights", total=total)
        self._bar.start()


def weights_bar() -> WeightsBar | None:
    """For an engine that is to be opened. None where standard error is no terminal."""
    from ds4mlx.config import color_wanted
    return WeightsBar(color_wanted("auto", True)) if sys.stderr.isatty() else None
