"""The bar of a prompt while it is computed."""
import sys
from typing import TYPE_CHECKING

from ds4mlx.chat.events import Event, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

REFRESHES_S = 5
WORTH_A_BAR = 64    # tokens: fewer are computed in the blink of an eye


class PromptBar:
    """How much of the prompt is computed, for how long, and how long yet, on standard error: gone with the first token.

    Nothing where standard error is no terminal, or where little is left to compute.
    """

    def __init__(self, color: bool) -> None:
        self._color = color
        self._bar: "Bar | None" = None
        self._task: "TaskID | None" = None

    def take(self, event: Event) -> None:
        if not isinstance(event, Progress):
            self.close()
        elif self._bar is not None:
            self._bar.update(self._task, completed=event.done)
        elif event.total - event.done > WORTH_A_BAR and sys.stderr.isatty():
            self._open(event)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self, event: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        console = Console(stderr=True, no_color=not self._color, highlight=False)
        left = TimeRemainingColumn(compact=True)
        self._bar = Bar(TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens,"),
                        TimeElapsedColumn(), TextColumn("so far,"), left, TextColumn("to the first token"),
                        console=console, transient=True, refresh_per_second=REFRESHES_S, redirect_stdout=False,
                        redirect_stderr=False)
        self._task = self._bar.add_task("prefill", total=event.total, completed=event.done)
        self._bar.start()
