"""The cache directory as a file system: private, locked between processes, written so that a crash tears nothing.

All names are taken relative to one open descriptor, no symbolic link inside is followed, and only regular files are
opened. What is written has a temporary name until it is whole.
"""
import errno
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.integrity import Image, check_footer

LOCK, TAG, QUARANTINE = ".lock", "CACHEDIR.TAG", "quarantine"
LOCK_WAIT_S = 5.0
DEAD_TEMP_S = 60.0
LEAST_FREE_BYTES = 2 << 30   # left free on the volume, or 2 % of it
TAG_TEXT = (b"Signature: 8a477f597d28d172789f06886806bc55\n"  # fixed by the convention that backup programs follow
            b"# Saved states of ds4mlx. They hold the text of conversations. All of it can be deleted at any time.\n")
STARTED = time.time()
_TEMP = re.compile(r"\.tmp-([1-9][0-9]{0,9})-[0-9a-f]{8}")
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class LockBusy(CheckpointError):
    """Another process holds the directory."""


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file in the directory, as the file system tells of it."""
    name: str
    nbytes: int
    modified_ns: int
    inode: int

    @property
    def modified(self) -> float:
        return self.modified_ns / 1e9

    @classmethod
    def of(cls, name: str, status: os.stat_result) -> "Found":
        return cls(name, status.st_size, status.st_mtime_ns, status.st_ino)


def nothing(step: str) -> None:
    """The usual `before`: every step is taken."""


class CacheDirectory:
    """One directory of checkpoints, open until `close`.

    before: called with the name of each step that changes the disk, before it is taken. An OSError it raises is as if
    the disk had. Raises CheckpointError when the directory is not private or cannot be locked.
    """

    def __init__(self, path: Path, before: Callable[[str], None] = nothing, *,
                 lock_wait_s: float = LOCK_WAIT_S) -> None:
        self.path, self._lock_wait_s = path, lock_wait_s
        self.before = before
        self.written_bytes = 0          # payload of all files, whether or not they were completed
        self._thread_lock = threading.Lock()
        self._fd = _open_private(path)
        self._quarantine = self._lock = -1
        try:
            self._quarantine = self._open_inside(QUARANTINE)
            self._lock = self._open_lock()
            self._tag()
        except OSError as fault:
            self.close()
            raise CheckpointError(f"{path}: {fault.strerror} ({fault.filename or 'cache directory'}); "
                                  "give another --kv-disk-dir or clear this one") from fault
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        for fd in (self._fd, self._quarantine, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._quarantine = self._lock = -1

    # ---- what is there

    def modified_ns(self) -> int:
        return os.fstat(self._fd).st_mtime_ns

    def files(self) -> list[Found]:
        """The regular files, in no order."""
        return _regular_files(self._fd)

    def quarantined(self) -> list[Found]:
        return _regular_files(self._quarantine)

    def look(self, name: str) -> Found | None:
        """A file as it is at this moment; None when it is gone or not regular."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return Found.of(name, status) if stat.S_ISREG(status.st_mode) else None

    def open(self, name: str) -> tuple[FileIO, Found]:
        """A file to read, unbuffered. Raises OSError; a link, a pipe or a directory counts as one that is missing."""
        # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _SAFE, dir_fd=self._fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
        return FileIO(fd, "rb"), Found.of(name, status)

    def room_bytes(self) -> int:
        """What may still be written to the volume."""
        volume = os.fstatvfs(self._fd)
        left_free = max(LEAST_FREE_BYTES, volume.f_blocks * volume.f_frsize // 50)
        return volume.f_bavail * volume.f_frsize - left_free

    # ---- changes

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Excludes other processes, and other threads, from deciding what goes. Raises LockBusy after `lock_wait_s`."""
        wait_s = self._lock_wait_s
        deadline = time.monotonic() + wait_s
        if not self._thread_lock.acquire(timeout=wait_s):
            raise LockBusy(f"{self.path}: in use by this process for {wait_s:.0f} s; trying again later")
        try:
            while not _try_lock(self._lock):
                if time.monotonic() >= deadline:
                    raise LockBusy(f"{self.path}: locked by another process for {wait_s:.0f} s; trying again later")
                time.sleep(0.01)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def temporary(self, reserve_bytes: int = 0) -> "Temporary":
        """A new file of a temporary name. Its size, `reserve_bytes` at first, is what other processes count for it."""
        self.before("create")
        name = f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._fd)
        temporary = Temporary(self, name, fd)
        try:
            temporary.reserve(reserve_bytes)
        except OSError:
            temporary.discard()
            raise
        return temporary

    def rename(self, temporary: str, name: str) -> None:
        self.before("rename")
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def sync(self) -> None:
        """Makes renames and deletions last."""
        self.before("sync")
        os.fsync(self._fd)

    def delete(self, name: str) -> None:
        """A file that is gone already is as good as deleted."""
        self.before("delete")
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass

    def delete_quarantined(self, name: str) -> None:
        self.before("delete")
        try:
            os.unlink(name, dir_fd=self._quarantine)
        except FileNotFoundError:
            pass

    def set_aside(self, found: Found) -> bool:
        """Moves a bad file to quarantine, unless another one has taken its name meanwhile."""
        now = self.look(found.name)
        if now is None or now.inode != found.inode:
            return False
        self.before("set aside")
        os.rename(found.name, found.name, src_dir_fd=self._fd, dst_dir_fd=self._quarantine)
        return True

    def patch(self, found: Found, writes: Sequence[tuple[int, bytes]]) -> None:
        """Overwrites bytes in place, without making that last: torn or lost, they do no harm."""
        fd = os.open(found.name, os.O_WRONLY | os.O_NONBLOCK | _SAFE, dir_fd=self._fd)
        try:
            if os.fstat(fd).st_ino == found.inode:
                for at, data in writes:
                    os.pwrite(fd, data, at)
        finally:
            os.close(fd)

    # ---- opening

    def _open_inside(self, name: str) -> int:
        try:
            os.mkdir(name, 0o700, dir_fd=self._fd)
        except FileExistsError:
            pass
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=self._fd)
        _check_private(fd, self.path / name)
        return fd

    def _open_lock(self) -> int:
        fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _SAFE, 0o600, dir_fd=self._fd)
        try:
            if _try_lock(fd):
                fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError as fault:
            os.close(fd)
            raise CheckpointError(f"{self.path}: its file system cannot lock files ({fault.strerror}); "
                                  "give a --kv-disk-dir on a local disk") from fault
        return fd

    def _tag(self) -> None:
        try:
            fd = os.open(TAG, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._fd)
        except FileExistsError:
            return
        with FileIO(fd, "wb") as file:
            file.write(TAG_TEXT)


class Temporary:
    """A file that is being written. `publish` or `discard` ends it."""

    def __init__(self, directory: CacheDirectory, name: str, fd: int) -> None:
        self._directory, self.name, self._fd = directory, name, fd

    def reserve(self, nbytes: int) -> None:
        """Sets the size that others see before there is anything in it: no block is taken."""
        os.ftruncate(self._fd, nbytes)

    def write(self, data: bytes | memoryview) -> int:
        self._directory.before("write")
        count = os.write(self._fd, data)
        self._directory.written_bytes += count
        return count

    def fill(self, image: Image) -> None:
        """Writes the whole file, makes it last and looks at its end again."""
        image.write(self)
        os.ftruncate(self._fd, image.nbytes)
        self._directory.before("fsync")
        os.fsync(self._fd)
        file, found = self._directory.open(self.name)
        with file:
            check_footer(file, found.nbytes)

    def publish(self, name: str) -> None:
        """Gives the file its name, in place of any other of that name."""
        self._directory.rename(self.name, name)
        self._close()

    def discard(self) -> None:
        """Deletes the file if it has not been published. Raises nothing: a rest is deleted at the next start."""
        if self._fd >= 0:
            self._close()
            try:
                self._directory.delete(self.name)
            except OSError:
                pass

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def is_temporary(name: str) -> bool:
    return _TEMP.fullmatch(name) is not None


def is_abandoned(found: Found, now: float) -> bool:
    """Whether the process that wrote a temporary file is gone, or had this one's number before."""
    match = _TEMP.fullmatch(found.name)
    if match is None or now - found.modified < DEAD_TEMP_S:
        return False
    pid = int(match[1])
    return found.modified < STARTED - DEAD_TEMP_S if pid == os.getpid() else not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _regular_files(fd: int) -> list[Found]:
    found = []
    # A descriptor of its own: threads that list one descriptor share the place in the list.
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        for name in os.listdir(own):
            try:
                status = os.stat(name, dir_fd=own, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(Found.of(name, status))
    finally:
        os.close(own)
    return found


def _open_private(path: Path) -> int:
    try:
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as fault:
        raise CheckpointError(f"{path}: {fault.strerror}; give a --kv-disk-dir that you may write to") from fault
    try:
        _check_private(fd, path)
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def _check_private(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise CheckpointError(f"{path} belongs to user {status.st_uid}, need {os.geteuid()}: whoever owns it can read "
                              "and change conversations; give another --kv-disk-dir")
    if status.st_mode & 0o022:
        raise CheckpointError(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), need 700; "
                              f"run chmod 700 {path}")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
