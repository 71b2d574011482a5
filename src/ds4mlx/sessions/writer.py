"""One thread that saves, so that nobody waits for a disk. What goes wrong there is logged and counted, never raised."""
import errno
import logging
import threading
import time
from collections.abc import Callable

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.room import NoRoom
from ds4mlx.sessions.saving import Saved, SaveJob

log = logging.getLogger(__name__)

FULL_PAUSE_S = 60.0


class Writer:
    """Takes one job at a time; a second one waits to be taken, a third is refused."""

    def __init__(self, save: Callable[[SaveJob], Saved], clock: Callable[[], float] = time.monotonic) -> None:
        self._save, self._clock = save, clock
        self._changed = threading.Condition()
        self._waiting: SaveJob | None = None
        self._busy = self._closed = False
        self._paused_until = 0.0
        self.saved = self.skipped = self.failed = 0
        self.last: Saved | None = None
        self._told_of_room = False      # since the last save that had room
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether the disk was full within the last minute."""
        return self._clock() < self._paused_until

    @property
    def idle(self) -> bool:
        """Whether no job is being done or waits to be."""
        return not self._busy and self._waiting is None

    @property
    def free(self) -> bool:
        """Whether no job waits to be taken."""
        return self._waiting is None

    def offer(self, job: SaveJob, wait_s: float = 0.0) -> bool:
        """False when another job is still waiting after `wait_s`, or saving is paused."""
        with self._changed:
            if self._closed or self.paused or not self._changed.wait_for(lambda: self._waiting is None, wait_s):
                self.skipped += 1
                log.info("kv cache skipped tokens=%d because %s", len(job.tokens),
                         "the disk was full" if self.paused else "the writer is busy")
                return False
            self._waiting = job
            self._changed.notify_all()
            return True

    def flush(self, wait_s: float) -> bool:
        """Waits until everything offered is done. False when it is not after `wait_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._busy, wait_s)

    def close(self, wait_s: float) -> bool:
        """Flushes and ends the thread."""
        done = self.flush(wait_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(wait_s if done else 0)
        return done

    def _run(self) -> None:
        while (job := self._next()) is not None:
            started = time.perf_counter()
            try:
                self._note(job, self._save(job), time.perf_counter() - started)
            except Exception as fault:  # the thread's outermost loop: a save that fails must not end all later ones
                self._note_failure(job, fault)
            del job  # its arrays are large
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> SaveJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            job, self._waiting = self._waiting, None
            self._busy = job is not None
            self._changed.notify_all()
            return job

    def _note(self, job: SaveJob, saved: Saved, took_s: float) -> None:
        self.saved, self.last, self._told_of_room = self.saved + 1, saved, False
        log.info("kv cache stored tokens=%d reason=%s key=%s size=%.2f MiB save=%.0f ms", len(job.tokens), job.reason,
                 saved.name[:8], saved.written_bytes / (1 << 20), 1000 * took_s)

    def _note_failure(self, job: SaveJob, fault: Exception) -> None:
        if isinstance(fault, CheckpointError):
            self.skipped += 1
            # A budget that is too small for a conversation is so again with its every turn: once is enough.
            level = logging.DEBUG if isinstance(fault, NoRoom) and self._told_of_room else logging.INFO
            self._told_of_room |= isinstance(fault, NoRoom)
            log.log(level, "kv cache skipped tokens=%d because %s", len(job.tokens), fault)
            return
        self.failed += 1
        if isinstance(fault, OSError):
            log.warning("kv cache skipped tokens=%d because %s (errno %s)", len(job.tokens), fault.strerror,
                        fault.errno)
            if fault.errno in (errno.ENOSPC, errno.EDQUOT):
                self._paused_until = self._clock() + FULL_PAUSE_S
        else:
            log.error("kv cache skipped tokens=%d because of a defect", len(job.tokens), exc_info=fault)
