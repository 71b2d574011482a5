"""The file of a trace: private, empty at the start, begun anew when it has grown too large. Writing to it never fails.

It holds conversations in full, so no link is followed and nobody but its owner may read it.
"""
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from ds4mlx.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """What a request wrote while another one's account was going on."""
    pieces: list[bytes] = field(default_factory=list)
    ended: bool = False


class TraceFile:
    """Accounts of requests, by their numbers, from any thread; every piece is in the file when `write` returns.

    max_bytes: a request that begins behind so many begins a new file, and the old one becomes FILE.1; 0: never.
    whole: each account in one piece, that of another request only after its end. Raises UsageError when the file
    cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int = 0, *, whole: bool = False) -> None:
        self.path, self._max_bytes, self._whole = path, max_bytes, whole
        self._lock = Lock()
        self._fd = _open(path)
        self._size = self._last = 0
        self._open: set[int] = set()        # requests whose account has begun in the file
        self._held: dict[int, _Held] = {}   # of those that wait for their turn, in order

    def number(self) -> int:
        """Of a new request."""
        with self._lock:
            self._last += 1
            return self._last

    def write(self, number: int, data: bytes, *, ends: bool = False) -> None:
        """Further bytes of a request's account, `ends` with the last of them."""
        with self._lock:
            if self._whole and self._open - {number}:
                held = self._held.setdefault(number, _Held())
                held.pieces.append(data)
                held.ended = ends
                return
            self._put(number, data, ends)
            while self._held and not self._open:
                waiting = next(iter(self._held))
                held = self._held.pop(waiting)
                self._put(waiting, b"".join(held.pieces), held.ended)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _put(self, number: int, data: bytes, ends: bool) -> None:
        begins = number not in self._open
        self._open.add(number)
        if ends:
            self._open.discard(number)
        if self._fd < 0:
            return
        try:
            if begins and 0 < self._max_bytes <= self._size:
                self._begin_anew()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest):]
            self._size += len(data)
        except (OSError, UsageError) as fault:  # a full disk, say: requests go on
            log.error("the trace ends: %s", fault)
            os.close(self._fd)
            self._fd = -1

    def _begin_anew(self) -> None:
        os.rename(self.path, f"{self.path}.1")
        fresh = _open(self.path)
        os.close(self._fd)
        self._fd, self._size = fresh, 0


def _open(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to read from it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
    except OSError as fault:
        found = "a symbolic link" if path.is_symlink() else fault.strerror
        raise UsageError(f"--trace {path}: {found}; give the path of a file of yours") from fault
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise UsageError(f"--trace {path}: no regular file of this user; give the path of one, or of none")
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, 0)
    return fd
