"""An evaluation on a terminal: the cases with their state on the left, what is said on the right, some keys."""
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ds4mlx.evaluation.asking import Progress
from ds4mlx.evaluation.cases import Case
from ds4mlx.evaluation.trace import Record
from ds4mlx.text.escaping import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

STYLES = {"pending": "dim", "prefill": "yellow", "thinking": "yellow", "answering": "cyan", "passed": "green",
          "failed": "red", "incomplete": "magenta", "skipped": "dim", "stopped": "magenta"}
KEYS = {b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
        b"\r": "enter", b"\n": "enter", b"p": "pause", b"q": "quit"}
WAIT_S, REFRESH_S = 0.05, 0.1
LIST_WIDTH, SHOWN = 42, 4000     # columns; characters of the text that are laid out


class Keyboard:
    """Keys as they are pressed, without waiting for them. To be entered."""

    def __enter__(self) -> Self:
        import termios
        import tty
        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin, termios.TCSANOW)   # Ctrl+C is still a signal
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None,
                 trace: TracebackType | None) -> None:
        import termios
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, self._before)

    def pressed(self, wait_s: float = 0.0) -> str | None:
        """The name of a key of KEYS; None for none, or another."""
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            return None
        return KEYS.get(os.read(sys.stdin.fileno(), 16))


class ScreenView:
    """See View. ↑ and ↓ select a case, Enter asks it next, p pauses, q leaves with the report, as Ctrl+C does."""

    def __init__(self, cases: Sequence[Case], pause_s: float, interrupted: Callable[[], bool]) -> None:
        self._cases, self._pause_s, self._interrupted = cases, pause_s, interrupted
        self._states = ["pending"] * len(cases)
        self._texts: list[list[tuple[str, str]]] = [[] for _ in cases]      # text and style
        self._tokens = [""] * len(cases)
        self._selected, self._wanted, self._running = 0, list[int](), -1
        self._paused = self._quit = False
        self._shown_at = 0.0
        self._keyboard = Keyboard()
        self._live: "Live | None" = None

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live
        self._keyboard.__enter__()
        self._live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._live.stop()
        self._keyboard.__exit__(kind, fault, trace)

    def next(self) -> int | None:
        until = time.monotonic() + (self._pause_s if self._running >= 0 else 0.0)
        self._show()
        while (self._paused or time.monotonic() < until and not self._wanted) and not self._quit:
            self._heed(WAIT_S)
        pending = [i for i, state in enumerate(self._states) if state == "pending"]
        if self._quit or not pending:
            self._states = ["skipped" if state == "pending" else state for state in self._states]
            return None
        while self._wanted:
            if (index := self._wanted.pop(0)) in pending:
                return index
        return pending[0]

    def begin(self, index: int, prompt_tokens: int) -> None:
        if self._selected == self._running or self._running < 0:
            self._selected = index      # goes along unless somebody looks at another
        self._running, self._states[index] = index, "prefill"
        self._show()

    def progress(self, index: int, progress: Progress) -> bool:
        self._states[index] = progress.phase
        self._tokens[index] = f"{progress.done:,} of {progress.total:,} tokens"
        if progress.text:
            self._texts[index].append((progress.text, "dim" if progress.phase == "thinking" else ""))
        self._heed(0.0)
        while self._paused and not self._quit:
            self._heed(WAIT_S)
        if time.monotonic() - self._shown_at > REFRESH_S:
            self._show()
        return not self._quit

    def again(self, index: int) -> None:
        self._texts[index].append(("\n\nno answer, asked again with twice the tokens\n\n", "magenta"))

    def end(self, index: int, found: Record) -> None:
        self._states[index] = found.grade.verdict
        self._texts[index].append((f"\n\n{found.grade.verdict}: {found.grade.given}, expected {found.grade.expected}",
                                   STYLES[found.grade.verdict]))
        self._show()

    def stopped(self, index: int) -> None:
        self._states[index] = "stopped"

    def _heed(self, wait_s: float) -> None:
        try:
            key = self._keyboard.pressed(wait_s)
        except InterruptedError:
            return
        match key:
            case "up" | "down":
                self._selected = (self._selected + (1 if key == "down" else -1)) % len(self._cases)
            case "enter":
                self._wanted.append(self._selected)
            case "pause":
                self._paused = not self._paused
            case "quit":
                self._quit = True
        self._quit |= self._interrupted()   # or a pause would outlast Ctrl+C
        if key:
            self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        self._live.update(self.picture(self._live.console.height), refresh=True)

    def picture(self, height: int) -> "RenderableType":
        """The whole screen, so many lines high."""
        from rich.layout import Layout
        from rich.panel import Panel
        from rich.text import Text
        layout = Layout()
        layout.split_row(Layout(name="cases", size=LIST_WIDTH), Layout(name="said"))
        passed = self._states.count("passed")
        head = f"{passed} passed, {len(self._cases) - self._states.count('pending')} of {len(self._cases)}"
        keys = "paused, p goes on" if self._paused else "↑↓ Enter p q"
        layout["cases"].update(Panel(self._list(height - 2), title=Text(head), subtitle=Text(keys, "dim")))
        case = self._cases[self._selected]
        layout["said"].update(Panel(self._said(height - 2), title=Text(case.id),
                                    subtitle=Text(self._tokens[self._selected], "dim")))
        return layout

    def _list(self, lines: int) -> "RenderableType":
        """Cases around the one that is selected."""
        from rich.text import Text
        first = max(0, min(self._selected - lines // 2, len(self._cases) - lines))
        text = Text(no_wrap=True, overflow="ellipsis")
        for i in range(first, min(first + lines, len(self._cases))):
            style = STYLES[self._states[i]]
            name = self._cases[i].id[:LIST_WIDTH - 17]
            text.append(f"{'▶' if i == self._selected else ' '} {self._states[i]:<11}", style)
            text.append(f"{name}\n", "bold" if i == self._running else "")
        return text

    def _said(self, lines: int) -> "RenderableType":
        """The end of what was said, after the question where there is room."""
        from rich.text import Text
        said = Text()
        for piece, style in self._texts[self._selected][-SHOWN:]:
            said.append(harmless(piece), style)
        if not said.plain:
            said.append(harmless(self._cases[self._selected].prompt()[:SHOWN]), "dim")
            return said
        width = max(20, self._live.console.width - LIST_WIDTH - 4) if self._live else 80
        wrapped = said[-SHOWN:].wrap(self._live.console, width) if self._live else said.split("\n")
        return Text("\n").join(wrapped[-lines:])
