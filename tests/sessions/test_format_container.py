"""The container's JSON is read by what it has to say, and by nothing else."""
import io
import json
import zlib

import numpy as np
import pytest

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.container import (
    FORMAT, MOST_JSON_BYTES, parse_container, read_arrays, read_container, read_json, write_container)
from ds4mlx.sessions.integrity import Corrupt, Foreign, Incomplete

ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def described(metadata=None, data_bytes=4, crcs='{"a":1}', **entries):
    said = {"format": FORMAT, "crc32": crcs} | (metadata or {})
    return parse_container(json.dumps({"__metadata__": said} | (entries or {"a": ENTRY})).encode(), data_bytes)


def test_a_sound_description_is_taken():
    assert [(a.name, a.nbytes) for a in described().arrays] == [("a", 4)] and described().crcs == (1,)


@pytest.mark.parametrize("change", [
    {"shape": [5]}, {"shape": [-4]}, {"shape": [4.0]}, {"shape": [True, 4]}, {"shape": 4}, {"shape": [2**32, 0]},
    {"shape": [4, 1, 1, 1, 1]}, {"shape": [2**31, 2**31, 2**31, 0]}, {"shape": [2**31, 2**31, 2**31, 4]},
    {"shape": [["4"]]}, {"data_offsets": [0, 5]}, {"data_offsets": [1, 5]}, {"data_offsets": [0]},
    {"data_offsets": None}, {"more": 1}])
def test_a_shape_or_place_that_does_not_add_up_is_corrupt(change):
    with pytest.raises(Corrupt):
        described(a=ENTRY | change)


def test_arrays_must_fill_the_data_without_holes_or_overlaps():
    for second in ([0, 4], [5, 9], [3, 7]):
        with pytest.raises(Corrupt):
            described(data_bytes=8, crcs='{"a":1,"b":1}', a=ENTRY, b=ENTRY | {"data_offsets": second})
    with pytest.raises(Corrupt):
        described(data_bytes=5)


@pytest.mark.parametrize("crcs", ["", "[]", "{}", '{"a":-1}', '{"a":4294967296}', '{"a":1,"b":1}', '{"a":1,"a":1}',
                                  '{"a":1.0}', '{"a":"1"}', '{"a":true}'])
def test_every_array_needs_its_crc(crcs):
    with pytest.raises(Corrupt):
        described(crcs=crcs)


def test_a_later_format_or_dtype_is_foreign():
    with pytest.raises(Foreign, match="ds4mlx-kv/2"):
        described({"format": "ds4mlx-kv/2"})
    with pytest.raises(Foreign, match="F8_E4M3"):
        described(a=ENTRY | {"dtype": "F8_E4M3"})


@pytest.mark.parametrize("raw", [
    "", "[]", "null", "{", '{"__metadata__":[]}', '{"__metadata__":{"format":1}}', '{"a":1,"a":1}', '{"a":NaN}',
    '{"a":1e9}', '{"a":' + "9" * 5000 + "}", "[" * 100_000, '{"a":' * 100_000, "[]" * 9, "\u00e9", "\0"])
def test_odd_json_is_corrupt_however_deep_or_long(raw):
    with pytest.raises(Corrupt):
        parse_container(raw.encode(), 0)


def test_names_are_plain():
    for name in ("", "a" * 65, "../a", "a b", "\n", "\ud800"):
        with pytest.raises(Corrupt):
            described(crcs=json.dumps({name: 1}), **{name: ENTRY})


@pytest.mark.parametrize("length", [0, 1, MOST_JSON_BYTES + 1, 2**63, 2**64 - 1])
def test_an_announced_length_is_compared_before_it_is_believed(length):
    src = io.BytesIO(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(Corrupt, match="JSON"):
        read_container(src, 0, payload_bytes=10, json_crc=zlib.crc32(b"{}"))


def test_a_list_too_long_to_be_read_back_is_not_written():
    with pytest.raises(CheckpointError, match="not saved"):
        write_container({"segments": "x" * MOST_JSON_BYTES}, {})


@pytest.mark.parametrize("dtype", ["u1", "<f2", "<u2", "<f4", "<u4", "<i4"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (2, 3, 4)])
def test_arrays_of_every_dtype_and_shape_are_read_as_they_were_written(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    length, raw, *data = write_container({"format": FORMAT}, {"a": array})
    found, src = np.empty(shape, dtype), io.BytesIO(b"".join(data))
    read_arrays(src, 0, parse_container(raw, array.nbytes), {"a": found})
    assert np.array_equal(found, array) and (8 + int.from_bytes(length, "little")) % 64 == 0


def test_an_array_is_checked_unless_told_otherwise():
    array = np.arange(4, dtype=np.uint8)
    container, found = parse_container(write_container({"format": FORMAT}, {"a": array})[1], 4), np.empty(4, np.uint8)
    with pytest.raises(Corrupt, match="CRC of a"):
        read_arrays(io.BytesIO(b"\0\1\2\4"), 0, container, {"a": found})
    read_arrays(io.BytesIO(b"\0\1\2\4"), 0, container, {"a": found}, verify=False)
    with pytest.raises(Incomplete, match="1 bytes early"):
        read_arrays(io.BytesIO(b"\0\1\2"), 0, container, {"a": found})


def test_integers_and_strings_are_all_that_is_read():
    assert read_json('{"a":[1,"b",{}]}') == {"a": [1, "b", {}]}
