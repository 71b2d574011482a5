"""The directory holds conversations: nobody else may read it, and nothing put into it leads anywhere else."""
import os
import stat

import pytest
from toy_store import history, key_of, load, open_store, same_state, save

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.directory import QUARANTINE, CacheDirectory


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def store(tmp_path):
    with_store = open_store(tmp_path / "parent" / "cache")
    yield with_store
    with_store.close()


def test_directories_are_made_for_the_owner_alone(store):
    assert mode(store.path) == mode(store.path.parent) == mode(store.path / QUARANTINE) == 0o700


def test_files_are_for_the_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "cache")
        save(store, history(3000), aliases=((b"<user>visible", "thinking-visible"),))
        store.close()
    finally:
        os.umask(before)
    assert {mode(path) for path in store.path.iterdir() if path.is_file()} == {0o600}


def test_backup_programs_are_told_to_skip_the_directory(store):
    assert (store.path / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, bits):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(bits)
    with pytest.raises(CheckpointError, match="chmod 700"):
        CacheDirectory(tmp_path / "cache")


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CheckpointError, match="belongs to user"):
        CacheDirectory(tmp_path / "cache")


def test_a_file_where_the_directory_should_be_is_refused(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(CheckpointError, match="--kv-disk-dir"):
        CacheDirectory(tmp_path / "cache")


@pytest.mark.parametrize("name", [".lock", QUARANTINE])
def test_a_link_in_the_place_of_a_part_of_the_directory_is_refused(tmp_path, name):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        CacheDirectory(tmp_path / "cache")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_tag_is_not_written_through_a_link(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "CACHEDIR.TAG").symlink_to(tmp_path / "victim")
    CacheDirectory(tmp_path / "cache").close()
    assert not (tmp_path / "victim").exists()


def test_a_head_that_is_a_link_is_not_followed(store, tmp_path):
    save(store, tokens := history(900))
    (head,) = store.path.glob("*.kvm")
    head.rename(tmp_path / "elsewhere.kvm")
    head.symlink_to(tmp_path / "elsewhere.kvm")
    assert store.find(key_of(tokens)).candidates == () and store.stats().heads == 0


def test_a_save_replaces_a_link_and_writes_nothing_through_it(store, tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    save(store, tokens := history(3000))
    for path in [*store.path.glob("*.kv?")]:
        path.unlink()
        path.symlink_to(tmp_path / "victim")
    assert save(store, tokens) == 1 and same_state(load(store, tokens), tokens)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_counting_a_hit_does_not_write_through_a_link(store, tmp_path):
    save(store, tokens := history(900))
    (found,) = [f for f in store._directory.files() if f.name.endswith(".kvm")]
    (store.path / found.name).rename(tmp_path / "elsewhere")
    (store.path / found.name).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(OSError):
        store._directory.patch(found, [(12, b"\xff\xff\xff\xff")])
    assert (tmp_path / "elsewhere").read_bytes() == before and len(tokens) == 900


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_neither_blocks_nor_counts(store, make):
    save(store, tokens := history(3000))
    for name in ("0" * 40 + "-aaaaaaaa-q2.kvm", "1" * 40 + "-aaaaaaaa-q2.kva", "0" * 32 + ".kvs"):
        make(store.path / name)
    assert same_state(load(store, tokens), tokens) and store.stats().heads == 1


def test_a_pipe_in_the_place_of_a_segment_does_not_block(store):
    save(store, tokens := history(3000))
    (segment,) = store.path.glob("*.kvs")
    segment.unlink()
    os.mkfifo(segment)
    with pytest.raises(CheckpointError):
        load(store, tokens)


def test_the_directory_may_be_moved_while_it_is_open(store, tmp_path):
    save(store, tokens := history(900))
    store.path.rename(tmp_path / "moved")
    assert save(store, other := history(900, seed=1)) == 1
    assert same_state(load(store, tokens), tokens) and same_state(load(store, other), other)
