"""A child process for calls that may take their process down with them, as a fault of a GPU does."""
import os
import signal
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from ds4mlx.errors import Ds4Error

KEPT = 4000     # characters of what a child said last

Parameters, Result = ParamSpec("Parameters"), TypeVar("Result")


class ChildDied(Ds4Error):
    """A call took its process down; the text is what the process said last on standard error."""


class Child:
    """Calls functions of modules, one after another, in a fresh interpreter: one that dies costs only its call."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ds4mlx-")
        self._said = Path(self._folder.name) / "stderr"
        self._pool = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def call(self, function: Callable[Parameters, Result], *args: Parameters.args) -> Result:
        """function(*args), which must go through pickle; what it raises is raised here. Raises ChildDied."""
        try:
            return self._pool.submit(function, *args).result()
        except BrokenProcessPool:
            self._pool.shutdown()
            said = self._said.read_text("utf-8", errors="replace")[-KEPT:].strip()
            self._pool = self._started()
            raise ChildDied(f"its process died; last words: {said or 'none'}") from None

    def _started(self) -> ProcessPoolExecutor:
        # Not forked: a GPU's driver does not survive a fork.
        return ProcessPoolExecutor(1, get_context("spawn"), _listen, (str(self._said),))


def _listen(said: str) -> None:
    """In the child: standard error, that of C++ included, into the file; an interrupt is for the parent to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 2)
    os.close(file)
