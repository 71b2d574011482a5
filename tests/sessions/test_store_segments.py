"""Rows are written once, shared by every conversation that begins with the same tokens, and go with their last head."""
import os
import time

import numpy as np
import pytest
from toy_files import IDENTITY
from toy_store import history, job_for, key_of, load, open_store, same_state, save

from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.sessions.format import Head, head_image
from ds4mlx.sessions.identity import chain_hashes
from ds4mlx.sessions.layout import head_arrays, row_counts, segment_arrays
from ds4mlx.sessions.segment import Segment, segment_image

STEP = 10_240
MIB = 1 << 20


@pytest.fixture
def store(tmp_path):
    with_store = open_store(tmp_path / "cache")
    yield with_store
    with_store.close()


def segments(store):
    return sorted(path.name for path in store.path.iterdir() if path.suffix == ".kvs")


def delete_head(store, tokens):
    """As eviction does it."""
    (candidate, *_) = store.find(key_of(tokens)).candidates
    with store._directory.lock():
        store._room.delete_head(candidate.name)


def test_a_save_writes_new_rows_and_a_head_however_long_the_prefix(store):
    whole = history(6 * STEP)
    written = []
    for count in range(STEP, 6 * STEP + 1, STEP):
        save(store, whole[:count], "continued")
        # The head repeats the tokens' ids and their text, here a byte each, and lists its segments by 32 digits.
        written.append(store.stats().saved_bytes - 5 * count - 36 * (count // 2048))
    assert len(segments(store)) == 30 and max(written) - min(written) < 256  # numbers have more digits or fewer


def test_two_conversations_over_one_beginning_store_its_rows_once(store):
    system = history(20_000)
    one, two = history(22_000, seed=1, after=system), history(23_000, seed=2, after=system)
    save(store, one)
    assert len(segments(store)) == 10
    save(store, two)
    assert len(segments(store)) == 10 + 2  # of the 11 of the second, 9 lie within the common 20 000 tokens
    assert same_state(load(store, one), one) and same_state(load(store, two), two)


def test_only_the_missing_spans_have_to_be_exported(store):
    save(store, tokens := history(5000))
    longer = history(9000, seed=1, after=tokens)
    assert store.missing_spans(longer) == [2, 3]
    assert sorted(job_for(store, longer).rows) == [2, 3]


def test_deleting_a_head_deletes_the_segments_it_alone_used(store):
    shared = history(4096)
    save(store, one := history(7000, seed=1, after=shared))
    save(store, two := history(7000, seed=2, after=shared))
    delete_head(store, one)
    assert len(segments(store)) == 3 and same_state(load(store, two), two)
    delete_head(store, two)
    assert segments(store) == []


def test_a_save_whose_segments_were_evicted_meanwhile_is_skipped(store):
    save(store, tokens := history(5000))
    job = job_for(store, history(9000, seed=1, after=tokens), "continued")
    delete_head(store, tokens)
    assert store.save(job) and store.flush()
    assert (store.stats().saved, store.stats().skipped, store.stats().heads) == (1, 1, 0)


@pytest.mark.parametrize("age_s,kept", [(60, True), (3600, False)])
def test_segments_without_a_head_go_at_the_start_once_no_save_can_be_writing_it(tmp_path, age_s, kept):
    first = open_store(tmp_path / "cache")
    save(first, history(5000))
    first.close()
    for path in first.path.iterdir():
        if path.suffix == ".kvm":
            path.unlink()
        elif path.suffix == ".kvs":
            os.utime(path, (time.time() - age_s,) * 2)
    second = open_store(tmp_path / "cache")
    assert (segments(second) != []) is kept
    second.close()


def test_segments_that_were_left_behind_are_used_by_the_next_save(store):
    save(store, tokens := history(5000))
    for path in list(store.path.iterdir()):
        if path.suffix == ".kvm":
            path.unlink()
    assert store.missing_spans(tokens) == []
    save(store, tokens)
    assert same_state(load(store, tokens), tokens)


def test_heads_of_a_later_version_keep_segments_alive(tmp_path):
    first = open_store(tmp_path / "cache")
    save(first, history(5000))
    first.close()
    for path in first.path.iterdir():
        if path.suffix == ".kvm":
            data = bytearray(path.read_bytes())
            data[3] = 2
            path.write_bytes(data)
        elif path.suffix == ".kvs":
            os.utime(path, (time.time() - 3600,) * 2)
    second = open_store(tmp_path / "cache")
    assert len(segments(second)) == 2 and second.stats().foreign == 1
    second.close()


# ---- what Flash writes

def flash(tokens):
    return {name: (array.shape, array.dtype) for name, array in schema.arrays(FLASH, tokens, packed=True).items()}


def zeros(arrays):
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in arrays.items()}


def flash_head_bytes(tokens):
    """Of a head whose key has four bytes a token, as text has."""
    arrays = zeros(head_arrays(flash, tokens, tokens // 2048))
    names = chain_hashes(IDENTITY, arrays["tokens"])
    return head_image(Head(bytes(4 * tokens), "token-text", "continued", tokens, MIB, IDENTITY,
                           row_counts(flash(tokens)), names), arrays).nbytes


def flash_segment_bytes():
    return segment_image(Segment("0" * 32, 0, IDENTITY), zeros(segment_arrays(flash))).nbytes


@pytest.mark.parametrize("tokens", [STEP, 10 * STEP, 50 * STEP])
def test_a_step_of_flash_writes_its_rows_and_a_small_head_whatever_the_prefix(tokens):
    rows = STEP // 4 * 21 * (584 + 68) + STEP // 128 * 20 * 584  # 21 layers of ratio 4, 20 of ratio 128
    assert rows < 5 * flash_segment_bytes() < rows + 0.1 * MIB < 36.5e6
    assert flash_head_bytes(tokens) <= 12 * MIB


def test_a_long_session_of_flash_takes_less_than_0_4_gb():
    assert 48 * flash_segment_bytes() + flash_head_bytes(100_000) <= 0.40e9
