"""Saves that are killed: `stopped_saves.py FOLDER` leaves a directory for each place where one can stop.

Run by test_store_crash.py. One process that has imported everything forks a child for each place.
"""
import os
import shutil
import signal
import sys
from pathlib import Path

from toy_store import history, job_for, open_store, save

from ds4mlx.sessions.directory import CacheDirectory

OLD = history(5000, seed=1)
NEW = history(7000, seed=2, after=OLD[:4500])  # shares two segments, writes one, a head and an alias
ALIAS = b"<user>as the client sends it back"


def save_new(store):
    return store.save(job_for(store, NEW, "evict", aliases=((ALIAS, "thinking-visible"),))) and store.flush()


class Stop:
    """Kills the process before step number `at`; where that is a write, after half of it if `torn`."""

    def __init__(self, at, torn):
        self.at, self.torn, self.steps = at, torn, 0

    def __call__(self, step):
        self.steps += 1
        if self.steps == self.at and not (self.torn and step == "write"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.at:
            write = os.write
            os.write = lambda fd, data: (write(fd, data[:len(data) // 2]), os.kill(os.getpid(), signal.SIGKILL))


def stopped(path, at, torn):
    """Whether a save into `path` got as far as step `at`."""
    if (child := os.fork()) == 0:
        save_new(open_store(path, directory=CacheDirectory(path, Stop(at, torn))))
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(folder):
    base = folder / "base"
    store = open_store(base)
    save(store, OLD)
    store.close()
    for torn in (False, True):
        at = 1
        while stopped(shutil.copytree(base, folder / f"{at}-{torn}"), at, torn):
            at += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
