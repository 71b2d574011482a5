"""One answer, made while it is read: pieces of text, or events, from a model here or on a server."""
from collections.abc import Iterator
from types import GeneratorType

from ds4mlx.chat.events import Event, Finish, Recovered, TextDelta, gather
from ds4mlx.engine.protocol import Step

SHOWN = 60  # characters of an answer that `repr` shows


class Answer:
    """Iterate over it for its text, piece by piece. Nothing is computed that nobody reads.

    Left early, it rests: reading it again goes on, and the next use of its session ends it where it is. One that was
    interrupted while it computed (Ctrl+C) has ended; the session goes on behind what was said.
    """

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._said: list[Event] = []
        # Where the model is on this machine: what was sampled so far.
        self.tokens: list[int] = []
        self.steps: list[Step] = []     # with log-probabilities

    def events(self) -> Iterator[Event]:
        """What is still to come, as `chat.events`: reasoning, text, tool calls, and last of all Finish."""
        for event in self._events:
            self._said.append(event)
            yield event

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if isinstance(event, TextDelta | Recovered):
                yield event.text

    def wait(self) -> "Answer":
        """The same answer, read to its end."""
        for _ in self.events():
            pass
        return self

    @property
    def text(self) -> str:
        """Said so far; `wait()` first for the whole."""
        return gather(self._said).content

    @property
    def reasoning(self) -> str:
        """Thought so far."""
        return gather(self._said).reasoning

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """(name, JSON text of the arguments) of each complete tool call."""
        return gather(self._said).calls

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The id of each of `calls`; results of tools refer to it."""
        return gather(self._said).call_ids

    @property
    def finish(self) -> Finish | None:
        """How it ended; None while there is more to come."""
        return self._said[-1] if self._said and isinstance(self._said[-1], Finish) else None

    def stop(self) -> None:
        """Nothing more comes; a server is told."""
        if isinstance(self._events, GeneratorType):
            self._events.close()
        self._events = iter(())

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        said = [repr(self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}…"),
                *(f"a call of {name}" for name, _ in self.calls)]
        resting = isinstance(self._events, GeneratorType) and self._events.gi_frame is not None
        more = "more to come: iterate over it, or wait()" if resting else "broken off"
        return f"<Answer {', '.join(said)}, {self.finish.reason if self.finish else more}>"
