"""What a chat shows: the bar of a prompt while it is computed, the answer as it comes, a line of figures below it."""
import sys
from typing import TYPE_CHECKING

from ds4mlx.chat.events import Event, Finish, Progress, gather
from ds4mlx.cli.answer import Speed, TextWriter, speed_line

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

BAR_REFRESHES_S = 5
WORTH_A_BAR = 64    # tokens: fewer are computed in the blink of an eye


class PromptBar:
    """How much of the prompt is computed, how fast and for how long, on standard error: gone with the first token.

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
                        console=console, transient=True, refresh_per_second=BAR_REFRESHES_S, redirect_stdout=False,
                        redirect_stderr=False)
        self._task = self._bar.add_task("prefill", total=event.total, completed=event.done)
        self._bar.start()


class AnswerView:
    """One answer of a chat: shown as its events come, and kept."""

    def __init__(self, color: bool, reasoning: bool) -> None:
        self._bar, self._speed = PromptBar(color), Speed()
        self._writer = TextWriter(sys.stdout, reasoning=reasoning, color=color and sys.stdout.isatty())
        self._events: list[Event] = []
        self.end: Finish | None = None

    def take(self, event: Event) -> None:
        self._speed.take(event)
        self._bar.take(event)
        if isinstance(event, Finish):
            self.end = event
            self._writer.end(event, {})
        else:
            self._events.append(event)
            self._writer.write(event)

    def close(self) -> None:
        self._bar.close()

    @property
    def said(self) -> tuple[str, str]:
        """Content and reasoning."""
        answer = gather(self._events)
        return answer.content, answer.reasoning

    def figures(self) -> str:
        """Speeds, what was reused, time to the first token."""
        assert self.end is not None, "the answer has not ended"
        return f"{speed_line(self.end, self._speed.numbers(self.end))}, first token {self._speed.first_token_s:.2f} s"
