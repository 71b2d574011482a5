"""One answer, made while it is read: pieces of text, or events, from a model here or on a server."""
from collections.abc import Generator, Iterator

from ds4mlx.chat.events import Event, Finish, Recovered, TextDelta, gather
from ds4mlx.engine.protocol import Step


class Answer:
    """Iterate over it for its text, piece by piece. Nothing is computed that nobody reads.

    Left early, it rests: reading it again goes on, and the next use of its session ends it where it is.
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
        if isinstance(self._events, Generator):
            self._events.close()
        self._events = iter(())

    def __str__(self) -> str:
        return self.text
