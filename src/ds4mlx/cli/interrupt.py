"""What Ctrl+C does to an answer."""
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4mlx.service.answer import Answer

INTERRUPTED = 130
SECOND_SIGNAL_S = 2.0
CURSOR_AND_COLOURS = "\x1b[?25h\x1b[0m\n"   # as they were before a bar and a dim text


class Interrupt:
    """Ctrl+C ends the answer and keeps it; a second one within two seconds, or one while loading, ends the process.

    Between `asks` and `watch`, while a long prompt is tokenized, it ends the answer that is about to begin.
    """

    def __init__(self) -> None:
        self.answer: "Answer | None" = None
        self._at = -SECOND_SIGNAL_S
        self._asking = self._given_up = False

    def listen(self) -> None:
        """From now on, in the running loop."""
        import asyncio
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self)

    def asks(self) -> None:
        """The next signal is for the answer that is asked for, however short a time ago another one was stopped."""
        self.answer, self._at = None, -SECOND_SIGNAL_S
        self._asking, self._given_up = True, False

    def watch(self, answer: "Answer") -> None:
        """It is there, and given up if there has been a signal."""
        self.answer, self._asking = answer, False
        if self._given_up:
            answer.cancel("cancelled")

    def rests(self) -> None:
        """No answer is asked for, or going on."""
        self.answer, self._asking = None, False

    def again(self) -> bool:
        """Whether this is the second within two seconds."""
        now = time.monotonic()
        before, self._at = self._at, now
        return now - before < SECOND_SIGNAL_S

    def __call__(self) -> None:
        if self.again() or self.answer is None and not self._asking:
            sys.stdout.flush()
            if sys.stderr.isatty():
                sys.stderr.write(CURSOR_AND_COLOURS)
                sys.stderr.flush()
            os._exit(INTERRUPTED)  # the engine thread is inside a computation that nothing can stop
        self._given_up = True
        if self.answer is not None:
            self.answer.cancel("cancelled")
