"""Several processes share one directory: nothing wrong is loaded, nobody waits for ever, the budget holds for all."""
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from toy_store import history, job_for, load, open_store, same_state, save

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions import directory as directory_module
from ds4mlx.sessions.directory import CacheDirectory, LockBusy


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.sweep)])
def test_two_processes_hammer_one_directory(tmp_path, seconds):
    script = Path(__file__).with_name("hammer.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path])}
    running = [subprocess.Popen([sys.executable, script, tmp_path / "cache", str(seed), str(seconds)], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for seed in (1, 2)]
    told = [process.communicate(timeout=seconds + 60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(told)


@pytest.fixture
def held(tmp_path):
    """A directory that somebody else has locked."""
    open_store(tmp_path / "cache").close()
    with open(tmp_path / "cache" / ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path / "cache"


def test_a_save_gives_up_on_a_lock_that_somebody_keeps(held):
    store = open_store(held, directory=CacheDirectory(held, lock_wait_s=0.05))
    assert save(store, history(900)) == 0 and store.stats().skipped == 1
    store.close()


def test_reading_needs_no_lock(tmp_path):
    store = open_store(tmp_path / "cache")
    save(store, tokens := history(900))
    with open(tmp_path / "cache" / ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert same_state(load(store, tokens), tokens)
    store.close()


def test_a_lock_that_is_let_go_is_taken(tmp_path):
    directory = CacheDirectory(tmp_path / "cache", lock_wait_s=60)
    with open(tmp_path / "cache" / ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.1, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        with directory.lock():
            pass
    directory.close()


def test_two_threads_exclude_each_other_too(tmp_path):
    directory = CacheDirectory(tmp_path / "cache", lock_wait_s=0.05)
    with directory.lock(), pytest.raises(LockBusy):
        with directory.lock():
            pass
    directory.close()


def test_a_file_system_that_cannot_lock_is_refused(tmp_path, monkeypatch):
    def unsupported(fd, operation):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(CheckpointError, match="cannot lock files"):
        CacheDirectory(tmp_path / "cache")


def test_a_state_saved_under_a_name_that_another_process_took_is_not_written_again(tmp_path):
    one, two = open_store(tmp_path / "cache"), open_store(tmp_path / "cache")
    job = job_for(two, tokens := history(3000))
    save(one, tokens)
    assert two.save(job) and two.flush() and two.stats().saved == 0
    one.close(), two.close()


def test_a_busy_writer_takes_one_more_save_and_refuses_the_next(tmp_path):
    gate = threading.Event()
    store = open_store(tmp_path / "cache", directory=CacheDirectory(tmp_path / "cache", lambda step: gate.wait(60)))
    jobs = [job_for(store, history(900, seed=seed)) for seed in range(3)]
    assert store.save(jobs[0]) and store.save(jobs[1], wait_s=60)
    assert store.save(jobs[2]) is False and store.flush(0.01) is False
    gate.set()
    assert store.flush() and store.stats().saved == 2
    store.close()


def test_a_defect_in_a_save_does_not_end_the_writer(tmp_path, caplog):
    store = open_store(tmp_path / "cache")
    save(store, history(3000), arrays={"tokens": history(3000)}, rows={0: {"L1.comp": None}})
    assert store.stats().failed == 1 and "defect" in caplog.text
    assert save(store, history(900)) == 1
    store.close()


def test_closing_finishes_what_is_queued(tmp_path):
    store = open_store(tmp_path / "cache")
    store.save(job_for(store, tokens := history(900), "shutdown"))
    assert store.close()
    again = open_store(tmp_path / "cache")
    assert same_state(load(again, tokens), tokens)
    again.close()


def test_temporary_files_of_a_number_that_this_process_has_now_are_left_over(tmp_path, monkeypatch):
    mine = tmp_path / "cache" / f".tmp-{os.getpid()}-01234567"
    open_store(tmp_path / "cache").close()
    mine.touch()
    os.utime(mine, (time.time() - 90,) * 2)
    monkeypatch.setattr(directory_module, "STARTED", time.time() - 300)
    open_store(tmp_path / "cache").close()
    assert mine.exists()
    monkeypatch.setattr(directory_module, "STARTED", time.time())
    open_store(tmp_path / "cache").close()
    assert not mine.exists()
