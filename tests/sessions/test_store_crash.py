"""A save that is killed, or that the disk fails, loses itself at most: what was complete before survives."""
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stopped_saves import ALIAS, NEW, OLD, save_new
from toy_store import history, key_of, load, open_store, same_state, save

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.directory import CacheDirectory


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A directory for each place at which a save was killed."""
    folder = tmp_path_factory.mktemp("stopped")
    script = Path(__file__).with_name("stopped_saves.py")
    paths = os.pathsep.join([str(script.parent), *sys.path])
    subprocess.run([sys.executable, script, folder], check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths})
    return sorted(path for path in folder.iterdir() if path.name != "base")


@pytest.fixture
def base(tmp_path):
    store = open_store(tmp_path / "base")
    save(store, OLD)
    store.close()
    return store.path


def finds_only_what_is_whole(path):
    """The old state as it was; the new one as it should be or not at all. Whether the new one is there."""
    store = open_store(path)
    assert same_state(load(store, OLD), OLD)
    found = load(store, NEW)
    aliased = store.find(ALIAS).candidates
    assert found is None or same_state(found, NEW)
    assert found or not aliased
    stats = store.stats()
    store.close()
    assert (stats.quarantined, stats.rejected, stats.foreign) == (0, 0, 0)
    return found is not None


def test_a_save_killed_at_any_step_loses_nothing_else(stopped):
    there = [finds_only_what_is_whole(path) for path in stopped]
    assert len(stopped) > 60 and True in there and False in there


def test_after_a_kill_the_same_state_can_be_saved(stopped):
    for path in stopped[::5]:
        store = open_store(path)
        save_new(store)
        assert same_state(load(store, NEW), NEW)
        store.close()


def test_what_a_killed_process_was_writing_goes_at_the_next_start(stopped):
    left = [file for path in stopped for file in path.glob(".tmp-*")]
    assert left
    for file in left:
        os.utime(file, (1e9, 1e9))
    for path in {file.parent for file in left}:
        open_store(path).close()
    assert not any(file.exists() for file in left)


def test_what_a_killed_process_was_writing_is_kept_for_a_minute(stopped, tmp_path):
    path = shutil.copytree(stopped[0], tmp_path / "copy")
    (path / ".tmp-999999999-01234567").touch()
    open_store(path).close()
    assert (path / ".tmp-999999999-01234567").exists()


class Failing:
    """Raises an error of the disk at step number `at`."""

    def __init__(self, at, number):
        self.at, self.number, self.steps = at, number, 0

    def __call__(self, step):
        self.steps += 1
        if self.steps == self.at:
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_at_any_step_fails_the_save_alone(base, tmp_path, number):
    at = failed = 1
    while failed:
        path = shutil.copytree(base, tmp_path / str(at))
        store = open_store(path, directory=CacheDirectory(path, Failing(at, number)))
        assert save_new(store)
        failed = store.stats().failed
        assert store.stats().paused is bool(failed and number == errno.ENOSPC)
        store.close()
        finds_only_what_is_whole(path)
        assert list(path.glob(".tmp-*")) == []
        at += 1
    assert at > 30


def test_after_a_full_disk_saving_pauses_and_loading_goes_on(base):
    failing = Failing(5, errno.ENOSPC)
    store = open_store(base, directory=CacheDirectory(base, failing))
    save_new(store)
    steps = failing.steps
    assert save_new(store) is False and failing.steps == steps
    assert same_state(load(store, OLD), OLD)
    store.close()


def test_after_an_error_of_the_disk_the_next_save_is_tried(base):
    store = open_store(base, directory=CacheDirectory(base, Failing(5, errno.EIO)))
    save_new(store)
    assert save(store, history(900)) == 1 and store.stats().failed == 1
    store.close()


def test_a_file_that_cannot_be_read_is_left_where_it_is_and_not_tried_again_at_once(base, monkeypatch):
    store = open_store(base)
    (candidate,) = store.find(key_of(OLD)).candidates

    def broken(self, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="cannot be read"):
        patched.setattr(CacheDirectory, "open", broken)
        store.load(candidate, key_of(OLD))
    assert store.find(key_of(OLD)).candidates == () and "Input/output" in store.find(key_of(OLD)).rejected[0][1]
    store.close()
    assert len(list(base.glob("*.kvm"))) == 1
