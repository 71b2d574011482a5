"""Segments: rows that are written once and shared by all conversations with the same beginning."""
import io
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load
from toy_files import IDENTITY, head_bytes, layout, segment_bytes, state

from ds4mlx.sessions.container import check_arrays, read_arrays
from ds4mlx.sessions.format import read_head
from ds4mlx.sessions.identity import chain_hashes, parse_name, segment_file
from ds4mlx.sessions.integrity import Foreign, Mismatch
from ds4mlx.sessions.layout import empty_arrays, head_views, segment_arrays, segment_views
from ds4mlx.sessions.segment import read_segment


def opened(data):
    return read_segment(io.BytesIO(data), len(data))


def test_every_full_span_has_a_name_that_depends_on_all_tokens_before_its_end():
    tokens = list(range(5000))
    names = chain_hashes(IDENTITY, tokens)
    assert len(names) == 2 == len(set(names)) and names == chain_hashes(IDENTITY, tokens[:4096])
    late, early = chain_hashes(IDENTITY, [*tokens[:4095], 0]), chain_hashes(IDENTITY, [1, *tokens[1:]])
    assert late[0] == names[0] and late[1] != names[1] and not set(early) & set(names)


@pytest.mark.parametrize("change", [{"base_fp": "e" * 64}, {"tokenizer_fp": "e" * 64}, {"layout_fp": "e" * 64},
                                    {"engine_abi": 2}, {"quant_bits": 4}])
def test_another_models_rows_have_other_names(change):
    assert chain_hashes(replace(IDENTITY, **change), range(2048)) != chain_hashes(IDENTITY, range(2048))


def test_the_names_of_files_are_told_apart():
    name = chain_hashes(IDENTITY, range(2048))[0]
    assert parse_name(segment_file(name)).stem == name
    assert [parse_name(odd) for odd in ("", name, f"{name}.kvs\n", "../" + segment_file(name), "x.kv")] == [None] * 5


def test_a_segment_is_read_as_it_was_written():
    whole = state(5000)
    stored = opened(segment_bytes(whole, span=1))
    assert (stored.segment.span, stored.segment.name) == (1, chain_hashes(IDENTITY, whole["tokens"])[1])
    assert stored.segment.identity == IDENTITY
    check_arrays(stored.container, segment_arrays(layout))


def test_head_and_segments_make_the_whole_state_again():
    whole, found = state(5000), empty_arrays(layout(5000))
    files = [head_bytes(whole, spans=2), segment_bytes(whole, 0), segment_bytes(whole, 1)]
    stored = [read_head(io.BytesIO(files[0]), len(files[0])), *map(opened, files[1:])]
    views = [head_views(found, layout, 2), segment_views(found, layout, 0), segment_views(found, layout, 1)]
    for data, one, into in zip(files, stored, views):
        read_arrays(io.BytesIO(data), one.data_at, one.container, into)
    assert all(np.array_equal(found[name], whole[name]) for name in whole)


def test_a_stock_safetensors_reader_opens_the_rows():
    whole = state(2048)
    data = segment_bytes(whole)
    found = load(data[32:-32])
    assert all(np.array_equal(found[name], whole[name]) for name in ("L1.comp", "L2.comp", "L2.index"))


def test_rows_are_read_only_into_arrays_of_their_shape():
    data = segment_bytes(state(2048))
    stored = opened(data)
    for name, array in (("L2.comp", np.empty((511, 3), np.uint8)), ("L3.comp", np.empty((512, 3), np.uint8))):
        with pytest.raises(Mismatch, match=name):
            read_arrays(io.BytesIO(data), stored.data_at, stored.container, {name: array})


def test_a_segment_of_a_later_version_is_foreign():
    data = bytearray(segment_bytes(state(2048)))
    data[3] = 2
    with pytest.raises(Foreign, match="version 2"):
        opened(data)
