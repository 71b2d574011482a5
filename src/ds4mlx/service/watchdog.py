"""Notices an engine thread that hangs, says so once, and lets nobody wait for it in vain."""
import logging
import sys
import threading
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_S = 5.0


class Watchdog:
    """Looks at `stuck` now and then, on a thread of its own; `refuse` is called each time that it is so."""

    def __init__(self, watched: threading.Thread, stuck: Callable[[], bool], refuse: Callable[[], None]) -> None:
        self._watched, self._stuck, self._refuse = watched, stuck, refuse
        self._told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.look()

    def look(self) -> None:
        if not self._stuck():
            self._told = False
            return
        if not self._told:
            self._told = True
            frame = sys._current_frames().get(self._watched.ident or 0)
            where = "".join(traceback.format_stack(frame)[-6:]) if frame else "its thread has ended\n"
            log.error("the engine has made no progress; restart the server, and report where it hangs:\n%s", where)
        self._refuse()
