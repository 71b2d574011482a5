"""The directory never holds more than its budget, and what it gives up for a new save is what is worth least."""
import logging
import os
import time
from types import SimpleNamespace

import pytest
from toy_store import MB, history, job_for, key_of, load, open_store, save

from ds4mlx.sessions.directory import CacheDirectory


@pytest.fixture
def size(tmp_path):
    """Bytes of one checkpoint of 1000 tokens."""
    store = open_store(tmp_path / "measured")
    save(store, history(1000))
    store.close()
    return store_bytes(tmp_path / "measured")


def store_bytes(path):
    return sum(p.stat().st_size for p in path.rglob("*") if p.suffix.startswith(".kv"))


def saved(store, tokens):
    return key_of(tokens) and any(c.tokens == len(tokens) for c in store.find(key_of(tokens)).candidates)


def holding(tmp_path, size, count, **options):
    """A store with room for `count` checkpoints of 1000 tokens."""
    return open_store(tmp_path / "cache", budget_bytes=int(size * (count + 0.5)), **options)


def test_the_budget_is_kept_by_evicting_before_writing(tmp_path, size):
    store = holding(tmp_path, size, 3)
    for seed in range(8):
        assert save(store, history(1000, seed=seed), "evict") == 1
        assert store_bytes(store.path) <= store.options.budget_bytes
    assert store.stats().evicted == 5 and saved(store, history(1000, seed=7))
    store.close()


def test_a_save_larger_than_the_budget_evicts_nothing(tmp_path, size):
    store = holding(tmp_path, size, 3)
    save(store, kept := history(1000))
    assert save(store, history(60_000, seed=1)) == 0
    assert saved(store, kept) and store.stats().skipped == 1
    store.close()


def test_saves_larger_than_the_budget_are_told_of_once_until_one_fits(tmp_path, size, caplog):
    store = holding(tmp_path, size, 3)
    with caplog.at_level(logging.INFO):
        for seed in range(2):
            for turn in range(3):
                save(store, history(60_000 + turn, seed=1))
            save(store, history(1000, seed=seed))
    told = [record.getMessage().split(" because")[0] for record in caplog.records if "skipped" in record.getMessage()]
    assert told == ["kv cache skipped tokens=60000"] * 2
    store.close()


def test_saving_the_outgoing_state_spares_the_prefix_that_a_waiting_request_needs(tmp_path, size):
    store = holding(tmp_path, size, 2)
    save(store, wanted := history(1000, seed=0), "continued")
    save(store, other := history(1000, seed=1), "cold")
    waiting = store.protect(key_of(history(1200, seed=5, after=wanted)))
    save(store, history(1000, seed=2), "evict")
    assert saved(store, wanted) and not saved(store, other)
    store.unprotect(waiting)
    save(store, history(1000, seed=3), "evict")
    assert not saved(store, wanted)
    store.close()


def test_pinned_files_stay_and_a_save_that_needs_their_room_is_skipped(tmp_path, size):
    store = holding(tmp_path, size, 1)
    save(store, tokens := history(1000))
    (candidate,) = store.find(key_of(tokens)).candidates
    store.pin(candidate.name)
    assert save(store, history(1000, seed=1)) == 0 and saved(store, tokens)
    store.release(candidate.name)
    assert save(store, history(1000, seed=1)) == 1 and not saved(store, tokens)
    store.close()


def test_segments_that_a_save_shares_are_not_evicted_to_make_room_for_it(tmp_path):
    whole = history(30_000)
    measured = open_store(tmp_path / "measured")
    save(measured, whole[:20_480], "continued")
    save(measured, whole, "continued")
    measured.close()
    store = open_store(tmp_path / "cache", budget_bytes=store_bytes(measured.path) - 1)  # the first head has to go
    save(store, whole[:20_480], "continued")
    assert save(store, whole, "continued") == 1 and store.stats().evicted == 1 and load(store, whole)
    store.close()


def test_of_one_conversation_the_shorter_save_goes_for_the_longer(tmp_path, size):
    store = holding(tmp_path, size, 2.2)
    save(store, other := history(1000, seed=1), "continued")
    time.sleep(1.1)  # times are whole seconds; the other one is older and would lose a tie
    save(store, mine := history(1000, seed=2), "continued")
    save(store, longer := history(1100, seed=3, after=mine), "continued")
    assert saved(store, other) and saved(store, longer)
    assert [c.tokens for c in store.find(key_of(longer)).candidates] == [1100]
    store.close()


def test_a_budget_lowered_between_runs_is_met_at_the_start_and_keeps_anchors(tmp_path, size):
    first = holding(tmp_path, size, 6)
    for seed in range(3):
        save(first, history(1000, seed=seed), "cold")
    for seed in range(3, 6):
        save(first, history(1000, seed=seed), "evict")
    first.close()
    second = holding(tmp_path, size, 3)
    assert [saved(second, history(1000, seed=seed)) for seed in range(6)] == [True] * 3 + [False] * 3
    assert store_bytes(second.path) <= second.options.budget_bytes
    second.close()


def test_quarantined_files_count_and_go_first(tmp_path, size):
    store = holding(tmp_path, size, 2)
    save(store, history(1000, seed=0))
    store.quarantine(store.find(key_of(history(1000, seed=0))).candidates[0].name, "no reason")
    save(store, kept := history(1000, seed=1))
    assert store.stats().quarantined == 1
    save(store, history(1000, seed=2))
    assert store.stats().quarantined == 0 and saved(store, kept)
    store.close()


def test_what_other_processes_are_writing_counts(tmp_path, size):
    store = holding(tmp_path, size, 2)
    save(store, tokens := history(1000))
    temporary = store.path / f".tmp-{os.getppid()}-01234567"
    temporary.touch()
    os.truncate(temporary, size)
    save(store, history(1000, seed=1))
    assert not saved(store, tokens) and store_bytes(store.path) + size <= store.options.budget_bytes
    store.close()


def test_a_reservation_is_visible_before_its_bytes_are_written(tmp_path):
    directory = CacheDirectory(tmp_path / "cache")
    temporary = directory.temporary(reserve_bytes=MB)
    assert directory.look(temporary.name).nbytes == MB
    temporary.discard()
    assert {found.name for found in directory.files()} == {".lock", "CACHEDIR.TAG"}
    directory.close()


def test_nothing_is_saved_on_a_volume_that_is_nearly_full(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    nearly_full = SimpleNamespace(f_blocks=1 << 20, f_frsize=4096, f_bavail=(2 << 30) // 4096)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: nearly_full)
    assert save(store, history(1000)) == 0 and store.stats().skipped == 1
    store.close()


def test_no_time_stamp_in_the_future_breaks_eviction(tmp_path, size):
    store = holding(tmp_path, size, 2)
    for seed in range(2):
        save(store, history(1000, seed=seed))
    for path in store.path.iterdir():
        os.utime(path, (time.time() + 1e8,) * 2)
    os.utime(store.path, (time.time() + 1e8,) * 2)
    assert save(store, last := history(1000, seed=2)) == 1 and saved(store, last)
    store.close()
