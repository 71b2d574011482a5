"""A head file and its aliases: what is written is read back, and fits the published example."""
import hashlib
import io
from dataclasses import replace

import numpy as np
import pytest
from fuzz_format import seal
from safetensors import deserialize
from safetensors.numpy import load
from toy_files import (
    BLOCKS, GOLDEN, IDENTITY, alias_bytes, arrays_in, bytes_of, golden_bytes, head_bytes, head_of, layout, open_alias,
    open_head, state)

from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.sessions.format import (
    Foreign, Mismatch, check_layout, check_usable, head_image, read_head, read_tokens, usage_writes)
from ds4mlx.sessions.identity import head_name, parse_name
from ds4mlx.sessions.integrity import Corrupt, check_footer
from ds4mlx.sessions.layout import head_arrays


def opened(data):
    return read_head(io.BytesIO(data), len(data))


def test_the_golden_file_parses():
    stored = opened(golden_bytes())
    assert stored.head.key.decode() == GOLDEN["key_text"]
    assert read_tokens(io.BytesIO(golden_bytes()), stored).tolist() == GOLDEN["tokens"]
    assert head_name(stored.head.key, stored.head.identity) == GOLDEN["file_name"]
    assert (stored.head.reason, stored.head.hits, stored.head.counts.raw) == ("cold", 7, (3, 3))


def test_the_golden_file_is_written_again_byte_for_byte():
    stored = opened(golden_bytes())
    written = bytes_of(head_image(stored.head, arrays_in(golden_bytes(), stored)))
    assert hashlib.sha256(written).hexdigest() == GOLDEN["sha256"]


def test_a_stock_safetensors_reader_opens_the_golden_payload():
    data = golden_bytes()
    found = dict(deserialize(data[GOLDEN["offsets"]["payload"]:GOLDEN["offsets"]["footer"]]))
    assert {name: bytes(array["data"]) for name, array in found.items()} == open_head(data)[1]
    assert found["L0.raw"]["dtype"] == "BF16"


def test_a_stock_safetensors_reader_opens_the_payload():
    whole = state(300)
    data = head_bytes(whole)
    stored = opened(data)
    start = stored.data_at - stored.container.json_bytes - 8
    found = load(data[start:stored.data_at + stored.container.data_bytes])
    assert found.keys() == whole.keys() and all(np.array_equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("changes", [
    {}, {"tool_map": BLOCKS}, {"key": "quoted \u00e9".encode() + b"\xff<user>"}, {"key": b""},
    {"key_kind": "responses-visible", "reason": "agent-session"}, {"hits": 3, "last_used": 1_790_000_100}])
def test_a_head_is_read_as_it_was_written(changes):
    whole = state(9)
    data = head_bytes(whole, **changes)
    assert opened(data).head == replace(head_of(whole, **changes), **{"last_used": 1_790_000_000} | changes)
    assert open_head(data)[1] == {name: array.tobytes() for name, array in whole.items()}


def test_the_size_is_known_before_anything_is_written():
    whole = state(300)
    image = head_image(head_of(whole), whole)
    assert image.nbytes == len(bytes_of(image)) and check_footer(io.BytesIO(bytes_of(image)), image.nbytes)


def test_arrays_are_not_copied_to_be_written():
    whole = state(300)
    image = head_image(head_of(whole), whole)
    assert any(np.shares_memory(np.asarray(part), whole["L2.comp"]) for part in image.parts)


def test_using_a_file_changes_it_in_place_and_leaves_it_valid():
    data = bytearray(head_bytes(state(9)))
    for at, raw in usage_writes(hits=5, now=1_800_000_000):
        data[at:at + len(raw)] = raw
    assert (opened(data).head.hits, opened(data).head.last_used) == (5, 1_800_000_000)


@pytest.mark.parametrize("at, value, why", [(3, 2, "version 2"), (5, 7, "reason 7"), (6, 8, "flags 0x08"),
                                            (6, 6, "flags 0x06"), (7, 2, "kind 2"), (7, 0, "no state")])
def test_a_sound_file_of_a_later_program_is_left_alone(at, value, why):
    data = golden_bytes()
    with pytest.raises(Foreign, match=why):
        opened(seal(data[:at] + bytes([value]) + data[at + 1:]))


@pytest.mark.parametrize("said, instead", [
    ('"frontier":"3"', '"frontier":"4"'), ('"ctx":"4096"', '"ctx":"4097"'), ("token-text", "token-test"),
    ('"key_sha1":"b', '"key_sha1":"a'), ('"tokens_sha1":"2', '"tokens_sha1":"3'), ("[3,3]", "[3,x]"),
    ("[3,3]", "[3,{}"), ('"base_fp":"1', '"base_fp":"G'), ('"engine_abi":"1"', '"engine_abi":"x"'),
    ('"tokens":{"dtype":"U32"', '"tokens":{"dtype":"F32"'), ('"tokens":{', '"tokenz":{')])
def test_a_payload_that_contradicts_itself_or_its_header_is_corrupt(said, instead):
    data = golden_bytes().replace(said.encode(), instead.encode())
    with pytest.raises(Corrupt):
        open_head(seal(data))


def test_segments_cannot_cover_more_than_the_tokens():
    name = "0" * 32
    assert opened(head_bytes(state(2048), segments=(name,))).head.segments == (name,)
    for wrong in ((name, name), ("x" * 32,), (f"../{name}"[:32],), (5,)):
        with pytest.raises(Corrupt, match="segments"):
            opened(head_bytes(state(2048), segments=wrong))


def test_an_alias_is_read_as_it_was_written():
    alias = open_alias(alias_bytes())
    assert (alias.key, alias.key_kind, alias.tokens) == (b"<user>hello again", "thinking-visible", 9)
    assert parse_name(alias.target).kind == "head"
    with pytest.raises(Foreign, match="no alias"):
        open_alias(head_bytes(state(9)))


def test_tokens_outside_the_vocabulary_are_refused():
    stored = opened(golden_bytes())
    with pytest.raises(Corrupt, match="128803"):
        read_tokens(io.BytesIO(golden_bytes()), stored, vocab_size=4)


def test_a_head_must_hold_the_arrays_that_the_engine_expects():
    check_layout(opened(head_bytes(state(300))), layout)
    with pytest.raises(Mismatch, match="L0.raw U8"):
        check_layout(opened(head_bytes(state(300))), lambda n: layout(n) | {"L0.raw": ((n, 3), np.dtype("<f2"))})
    with pytest.raises(Mismatch, match="no further array"):
        check_layout(opened(head_bytes(state(300))), lambda n: layout(n) | {"L9.raw": ((n, 3), np.dtype("u1"))})


@pytest.mark.parametrize("change", ["base_fp", "tokenizer_fp", "layout_fp", "engine_abi"])
def test_another_models_state_is_not_usable(change):
    other = replace(IDENTITY, **{change: 2 if change == "engine_abi" else "e" * 64})
    with pytest.raises(Mismatch, match=change):
        check_usable(head_of(state(9)), other, ctx=1 << 20, min_tokens=1)


def test_other_weights_are_usable_only_when_both_name_one_source():
    check_usable(head_of(state(9)), replace(IDENTITY, weights_fp="e" * 64), ctx=1 << 20, min_tokens=1)
    with pytest.raises(Mismatch, match="weights"):
        check_usable(head_of(state(9)), replace(IDENTITY, weights_fp=IDENTITY.base_fp), ctx=1 << 20, min_tokens=1)


def test_another_quantisation_is_usable_unless_refused():
    four = replace(IDENTITY, quant_bits=4, weights_fp="e" * 64)
    check_usable(head_of(state(9)), four, ctx=1 << 20, min_tokens=1)
    with pytest.raises(Mismatch, match="4"):
        check_usable(head_of(state(9)), four, ctx=1 << 20, min_tokens=1, same_quant=True)


def test_a_larger_context_may_load_a_smaller_ones_state_but_not_the_reverse():
    head = head_of(state(9), ctx=8192)
    check_usable(head, IDENTITY, ctx=16384, min_tokens=9)
    with pytest.raises(Mismatch, match="8192"):
        check_usable(head, IDENTITY, ctx=4096, min_tokens=9)
    with pytest.raises(Mismatch, match="worth"):
        check_usable(head, IDENTITY, ctx=16384, min_tokens=10)


@pytest.mark.parametrize("tokens", [10_240, 102_400])
def test_an_aligned_head_of_flash_takes_at_most_12_mib_whatever_the_prefix(tokens):
    arrays = head_arrays(lambda n: {name: (a.shape, a.dtype) for name, a in schema.arrays(FLASH, n, True).items()},
                         tokens, tokens // 2048)
    assert sum(np.prod(shape, dtype=int) * dtype.itemsize for shape, dtype in arrays.values()) <= 12 << 20
