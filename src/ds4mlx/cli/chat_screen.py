"""What a chat shows of an answer: its text as it comes, then a line of figures."""
import sys
from dataclasses import dataclass

from ds4mlx.chat.events import Event, Finish, gather
from ds4mlx.cli.answer import Speed, TextWriter, speed_line
from ds4mlx.cli.prompt_bar import PromptBar


@dataclass(frozen=True, slots=True)
class Style:
    """reasoning: it is shown. Answers go to standard output, notes to standard error."""
    reasoning: bool
    colored_answers: bool
    colored_notes: bool


class AnswerView:
    """One answer of a chat: shown as its events come, and kept."""

    def __init__(self, style: Style) -> None:
        self._bar, self._speed = PromptBar(style.colored_notes), Speed()
        self._writer = TextWriter(sys.stdout, reasoning=style.reasoning, color=style.colored_answers)
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
