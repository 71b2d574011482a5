"""A saved state is found by its text, comes back as it was, and is not written twice."""
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from toy_files import IDENTITY
from toy_store import history, job_for, key_of, load, open_store, same_state, save, state_of

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.directory import CacheDirectory
from ds4mlx.sessions.toolmap import ToolBlock

BLOCK = ToolBlock(("call_1", "call_2"), "", "\n\n<calls/>", (1, 2))


@pytest.fixture
def store(tmp_path):
    with_store = open_store(tmp_path / "cache")
    yield with_store
    assert with_store.close()


def files(store, suffix):
    return sorted(path for path in store.path.iterdir() if path.name.endswith(suffix))


# ---- save and load

@pytest.mark.parametrize("count", [512, 700, 2047, 2048, 2049, 6000])
def test_a_state_comes_back_as_it_was(store, count):
    tokens = history(count)
    assert save(store, tokens) == 1
    assert same_state(load(store, history(count + 50, seed=1, after=tokens)), tokens)


def test_a_state_survives_a_restart(tmp_path):
    tokens = history(3000)
    first = open_store(tmp_path / "cache")
    save(first, tokens)
    first.close()
    second = open_store(tmp_path / "cache")
    assert same_state(load(second, tokens), tokens)
    second.close()


def test_another_store_finds_what_was_saved_meanwhile(store, tmp_path):
    other = open_store(tmp_path / "cache")
    save(store, tokens := history(900))
    assert same_state(load(other, tokens), tokens)
    other.close()


def test_a_prompt_that_does_not_begin_with_it_finds_nothing(store):
    save(store, history(900))
    assert load(store, history(900, seed=1)) is None
    assert load(store, history(899)) is None


def test_the_longest_prefix_is_tried_first_and_three_at_most(store):
    whole = history(5000)
    for count in (600, 4000, 1500, 2500):
        save(store, whole[:count])
    assert [c.tokens for c in store.find(key_of(whole)).candidates] == [4000, 2500, 1500]


def test_saving_the_same_text_again_writes_nothing(store):
    save(store, tokens := history(3000))
    written = store.stats().written_bytes
    assert save(store, tokens, "evict") == 0
    assert store.stats().written_bytes == written


def test_a_state_that_is_covered_by_disk_is_not_worth_an_export(store):
    save(store, history(3000))
    grown = history(3500, seed=1, after=history(3000))
    assert store.why_not_save("evict", grown) == "3000 of them are on disk"
    assert store.why_not_save("evict", history(3600, seed=1, after=history(3000))) is None
    assert store.why_not_save("evict", history(3500, seed=2)) is None
    assert store.why_not_save("cold", grown[:511]) == "fewer than 512 tokens"


# ---- hits

def test_a_hit_is_counted_in_the_file_and_deletes_nothing(store, tmp_path):
    save(store, tokens := history(40_000, seed=3), "evict")  # deeper than cold saves go
    for turn in (b"1", b"2", b"3"):
        assert same_state(load(store, tokens, more=turn), tokens)
    fresh = open_store(tmp_path / "cache")
    (record,) = fresh._index.heads.values()
    assert record.head.hits == 3 and record.head.last_used >= record.head.created
    fresh.close()


def test_a_file_restored_again_and_again_is_left_alone(store):
    save(store, tokens := history(900))
    assert load(store, tokens) and load(store, tokens)
    found = store.find(key_of(tokens))
    assert found.candidates == () and "without progress" in found.rejected[0][1]
    assert load(store, tokens, slot=1) is None and load(store, tokens, more=b"And then?")


def test_a_slot_that_went_on_may_restore_its_file_again(store):
    save(store, tokens := history(900))
    for _ in range(4):
        assert load(store, tokens)
        store.continued(0)


# ---- a disk that hangs

@pytest.mark.parametrize("step", ["create", "write", "fsync", "rename", "sync"])
def test_nothing_but_saves_waits_for_a_save_whose_disk_hangs(tmp_path, step):
    hung = HungAt(step)
    store = open_store(tmp_path / "cache", directory=CacheDirectory(tmp_path / "cache", hung))
    save(store, old := history(900))
    hung.armed = True
    store.save(job_for(store, new := history(3000, seed=1)))
    assert hung.reached.wait(60)
    number, request = store.protect(key_of(old)), history(950, seed=2, after=old)
    assert same_state(load(store, request), old) and store.why_not_save("evict", request)
    assert store.tool_block("call_1") is None and len(store.missing_spans(new)) < 2 and store.stats().saved == 1
    store.continued(0), store.unprotect(number), hung.passes.set()
    assert store.flush() and same_state(load(store, new), new) and store.close()


class HungAt:
    """A hook of a directory that stays in a step once it is armed; a test that waits for it fails after 10 s."""

    def __init__(self, step):
        self.step, self.armed = step, False
        self.reached, self.passes = threading.Event(), threading.Event()

    def __call__(self, step):
        if self.armed and step == self.step:
            self.reached.set()
            assert self.passes.wait(60), "nobody goes on while the disk hangs"


# ---- which may be used

def test_a_larger_context_loads_what_a_smaller_one_saved(tmp_path):
    small = open_store(tmp_path / "cache", ctx=8192)
    save(small, tokens := history(900))
    small.close()
    large = open_store(tmp_path / "cache", ctx=16_384)
    assert same_state(load(large, tokens), tokens)
    large.close()


def test_a_smaller_context_says_why_not_and_keeps_the_file(tmp_path):
    large = open_store(tmp_path / "cache", ctx=16_384)
    save(large, tokens := history(900))
    large.close()
    small = open_store(tmp_path / "cache", ctx=8192)
    found = small.find(key_of(tokens))
    assert found.candidates == () and "8192" in found.rejected[0][1] and len(files(small, ".kvm")) == 1
    small.close()


@pytest.mark.parametrize("change", [{"base_fp": "a" * 63 + "b"}, {"tokenizer_fp": "9" * 64}, {"layout_fp": "9" * 64},
                                    {"engine_abi": 2}])
def test_a_state_of_another_model_is_refused_and_kept(store, tmp_path, change):
    save(store, tokens := history(900))
    other = open_store(tmp_path / "cache", identity=replace(IDENTITY, **change))
    found = other.find(key_of(tokens))
    assert found.candidates == () and len(found.rejected) == 1 and len(files(other, ".kvm")) == 1
    other.close()


@pytest.mark.parametrize("same_quant", [False, True])
def test_another_quantisation_is_used_unless_that_is_switched_off(store, tmp_path, same_quant):
    save(store, tokens := history(3000))
    other = open_store(tmp_path / "cache", identity=replace(IDENTITY, quant_bits=4, weights_fp="9" * 64),
                       same_quant=same_quant)
    assert (load(other, tokens) is None) is same_quant
    other.close()


def test_files_of_other_names_are_neither_counted_nor_touched(store):
    save(store, history(900))
    before = store.stats().total_bytes
    for name in ("notes.txt", "0" * 40 + ".kv", "sysprompt.kvm"):
        (store.path / name).write_bytes(b"KVC" + bytes(99))
    assert store.stats().total_bytes == before and store.stats().quarantined == 0


def test_files_of_a_later_version_are_counted_and_left_alone(store):
    save(store, tokens := history(900))
    head = files(store, ".kvm")[0]
    later = bytearray(head.read_bytes())
    later[3] = 2
    name = "0" * 40 + "-aaaaaaaa-q2.kvm"
    (store.path / name).write_bytes(later)
    assert store.stats().foreign == 1 and (store.path / name).exists() and same_state(load(store, tokens), tokens)


# ---- bad files

def damage(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_cut_file_goes_to_quarantine_and_the_next_candidate_is_found(store):
    whole = history(1500)
    save(store, whole[:600])
    save(store, whole)
    longest = max(files(store, ".kvm"), key=lambda p: p.stat().st_size)
    os.truncate(longest, 700)
    assert same_state(load(store, whole), whole[:600])
    assert [p.name for p in (store.path / "quarantine").iterdir()] == [longest.name]


def test_damage_that_only_reading_finds_goes_to_quarantine(store):
    save(store, tokens := history(900))
    (head,) = files(store, ".kvm")
    damage(head, head.stat().st_size - 40)  # in the last array
    with pytest.raises(CheckpointError, match="CRC"):
        load(store, tokens)
    assert store.find(key_of(tokens)).candidates == () and not head.exists()


@pytest.mark.parametrize("hurt", [lambda path: damage(path, 1500), lambda path: path.unlink(),
                                  lambda path: os.truncate(path, 100)])
def test_a_bad_segment_takes_its_head_along_and_is_written_anew(store, hurt):
    save(store, tokens := history(5000))
    hurt(files(store, ".kvs")[1])
    with pytest.raises(CheckpointError):
        load(store, tokens)
    assert files(store, ".kvm") == []
    assert save(store, tokens) == 1 and same_state(load(store, tokens), tokens)


def test_logits_that_are_no_numbers_are_never_restored(store):
    arrays = state_of(tokens := history(900))
    arrays["logits"][2] = np.nan
    save(store, tokens, arrays=arrays)
    with pytest.raises(CheckpointError, match="finite"):
        load(store, tokens)
    assert store.stats().quarantined == 1


def test_a_state_that_failed_afterwards_can_be_set_aside(store):
    save(store, tokens := history(900))
    store.quarantine(store.find(key_of(tokens)).candidates[0].name, "the engine could not go on from it")
    assert store.find(key_of(tokens)).candidates == ()


def test_a_name_that_is_not_the_hash_of_the_key_goes_to_quarantine(store):
    save(store, tokens := history(900))
    (head,) = files(store, ".kvm")
    head.rename(store.path / ("0" * 40 + "-aaaaaaaa-q2.kvm"))
    assert store.find(key_of(tokens)).candidates == () and store.stats().quarantined == 1


def test_a_file_that_vanished_is_no_fault(store):
    save(store, tokens := history(900))
    (candidate,) = store.find(key_of(tokens)).candidates
    files(store, ".kvm")[0].unlink()
    with pytest.raises(CheckpointError, match="gone"):
        store.load(candidate, key_of(tokens))
    assert store.stats().quarantined == store.stats().rejected == 0


def test_quarantine_keeps_the_latest_eight(store):
    for seed in range(10):
        save(store, tokens := history(600, seed=seed))
        store.quarantine(store.find(key_of(tokens)).candidates[0].name, "no reason")
    assert len(list((store.path / "quarantine").iterdir())) == 8


# ---- aliases and tools

VISIBLE = b"<user>what the client sends back"


def test_a_state_is_found_by_each_of_its_aliases(store):
    save(store, tokens := history(900), "shutdown", aliases=((VISIBLE, "thinking-visible"),))
    (candidate,) = store.find(VISIBLE + b" and more").candidates
    assert same_state(store.load(candidate, VISIBLE + b" and more"), tokens)
    assert (candidate.text_bytes, candidate.alias.endswith(".kva")) == (len(VISIBLE), True)


def test_an_alias_is_added_to_a_state_that_is_on_disk(store):
    save(store, tokens := history(900))
    written = store.stats().written_bytes
    save(store, tokens, aliases=((VISIBLE, "thinking-visible"),))
    assert store.find(VISIBLE).candidates and store.stats().written_bytes - written < 300


def test_an_alias_whose_text_differs_is_not_trusted(store, tmp_path):
    save(store, tokens := history(900), aliases=((VISIBLE, "thinking-visible"),))
    (candidate,) = store.find(VISIBLE).candidates
    with pytest.raises(CheckpointError, match="no key"):
        store.load(candidate, b"other")
    assert same_state(load(store, tokens), tokens)


def test_a_bad_alias_goes_to_quarantine_and_its_state_stays(store):
    save(store, tokens := history(900), aliases=((VISIBLE, "thinking-visible"),))
    (candidate,) = store.find(VISIBLE).candidates
    damage(store.path / candidate.alias, 60)  # in its text
    with pytest.raises(CheckpointError):
        store.load(candidate, VISIBLE)
    assert store.find(VISIBLE).candidates == () and same_state(load(store, tokens), tokens)


def test_an_alias_without_its_state_is_deleted_at_the_start(tmp_path):
    first = open_store(tmp_path / "cache")
    save(first, history(900), aliases=((VISIBLE, "thinking-visible"),))
    first.close()
    files(first, ".kvm")[0].unlink()
    second = open_store(tmp_path / "cache")
    assert files(second, ".kva") == []
    second.close()


def test_a_block_of_tool_calls_is_found_by_each_id_after_a_restart(tmp_path):
    first = open_store(tmp_path / "cache")
    save(first, history(900), blocks=(BLOCK,))
    first.close()
    second = open_store(tmp_path / "cache")
    assert second.tool_block("call_1") == second.tool_block("call_2") == BLOCK
    assert second.tool_block("call_3") is None
    second.close()


def test_blocks_are_added_to_a_state_that_is_on_disk(store):
    save(store, tokens := history(3000))
    assert load(store, tokens)
    assert save(store, tokens, blocks=(BLOCK,)) == 1 and store.tool_block("call_2") == BLOCK
    store.continued(0)
    assert same_state(load(store, tokens), tokens)
