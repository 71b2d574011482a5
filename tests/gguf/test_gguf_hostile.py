"""Damaged, hostile and foreign files give one clear error: no other traceback, no hang, no large allocation."""
import os
import random
import sys
import tracemalloc
from struct import pack

import numpy as np
import pytest

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF, MAX_HEADER_BYTES
from ds4mlx.gguf.writer import write_gguf

HUGE = (1 << 64) - 1


def text(s: bytes) -> bytes:
    return pack("<Q", len(s)) + s


def tensor(name: bytes, dims=(8,), type_id=0, offset=0, rank=None) -> bytes:
    return text(name) + pack(f"<I{len(dims)}QIQ", len(dims) if rank is None else rank, *dims, type_id, offset)


def header(keys=(), tensors=(), key_count=None, tensor_count=None, version=3) -> bytes:
    counts = [len(part) if count is None else count for part, count in ((tensors, tensor_count), (keys, key_count))]
    raw = b"GGUF" + pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return raw + bytes(-len(raw) % 32)


DATA = bytes(64)
HOSTILE = {
    "version 2, need 3": header(version=2),
    "version 50331648": b"GGUF" + bytes([0, 0, 0, 3]) + bytes(16),
    "announces 18446744073709551615 tensors": header(tensor_count=HUGE),
    "announces 4000000000 keys": header(key_count=4_000_000_000),
    "a metadata key needs 18446744073709551615 bytes": header([pack("<Q", HUGE)]),
    "a metadata key needs 99 bytes": header([pack("<Q", 99) + b"k"]),
    "a metadata key at byte 24 has 0 characters": header([text(b"") + pack("<IB", 0, 1)]),
    "a metadata key at byte 24 has 2 characters": header([text(b"a\n") + pack("<IB", 0, 1)]),
    "a metadata key at byte 32 is not UTF-8": header([text(b"\xff") + pack("<IB", 0, 1)]),
    "key k occurs twice": header([text(b"k") + pack("<IB", 0, 1)] * 2),
    "key k has value type 13": header([text(b"k") + pack("<I", 13)]),
    "k needs 1099511627776 bytes": header([text(b"k") + pack("<IQ", 8, 1 << 40)]),
    "k needs 73786976294838206460 bytes": header([text(b"k") + pack("<IIQ", 9, 4, HUGE)]),
    "k announces 18446744073709551615 strings": header([text(b"k") + pack("<IIQ", 9, 8, HUGE)]),
    "k needs 1010 bytes": header([text(b"k") + pack("<IIQQ", 9, 8, 1, 1002)]) + DATA,
    "k needs 1018 bytes": header([text(b"k") + pack("<IIQQ", 9, 8, 2, 1002)]) + DATA,
    "array of arrays": header([text(b"k") + pack("<IIQ", 9, 9, 1) + pack("<IQ", 4, 0)]),
    "alignment is 0": header([text(b"general.alignment") + pack("<II", 4, 0)]),
    "alignment is 24": header([text(b"general.alignment") + pack("<II", 4, 24)]),
    "alignment is 2147483648": header([text(b"general.alignment") + pack("<II", 4, 1 << 31)]),
    "alignment is no number": header([text(b"general.alignment") + pack("<I", 8) + text(b"32")]),
    "a has 0 dimensions": header(tensors=[tensor(b"a", ())]),
    "a has 1000 dimensions": header(tensors=[tensor(b"a", rank=1000)]),
    "a has dimensions [8, 0], none": header(tensors=[tensor(b"a", (8, 0))]) + DATA,
    "a needs 73786976294838206460 bytes": header(tensors=[tensor(b"a", (HUGE,))]) + DATA,
    f"a needs {4 * HUGE**4} bytes": header(tensors=[tensor(b"a", (HUGE,) * 4)]) + DATA,
    "a needs 400 bytes": header(tensors=[tensor(b"a", (100,))]) + DATA,
    "needs 32 bytes at 1844674407370955": header(tensors=[tensor(b"a", offset=HUGE - 31)]) + DATA,
    "offset 4, need a multiple of 32": header(tensors=[tensor(b"a", offset=4)]) + DATA,
    "a row of 100 weights is not a whole number of Q2_K": header(tensors=[tensor(b"a", (100,), 10)]) + DATA,
    "tensor a occurs twice": header(tensors=[tensor(b"a"), tensor(b"a")]) + DATA,
    "tensors a and b overlap": header(tensors=[tensor(b"b", (9,), offset=0), tensor(b"a", (8,))]) + DATA,
    "overlap at byte": header(tensors=[tensor(b"b", (8,), offset=32), tensor(b"a", (16,))]) + DATA,
    "tensors b and a overlap": header(tensors=[tensor(b"b", (4, 2)), tensor(b"a")]) + DATA,
    "not a GGUF file: it begins with b'Once'": b"Once upon a time there was a text file.\n" * 10,
    "begins with b'GG'": b"GG",
    "the version needs 4 bytes": b"GGUF",
    "the file is empty": b"",
}


@pytest.mark.parametrize("message", HOSTILE)
def test_damage_is_named_and_costs_no_memory(tmp_path, message):
    (tmp_path / "m.gguf").write_bytes(HOSTILE[message])
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as error:
            GGUF.open(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path / "m.gguf"))
    assert "\n" not in str(error.value)


def test_the_very_same_range_may_be_shared(tmp_path):
    (tmp_path / "m.gguf").write_bytes(header(tensors=[tensor(b"a"), tensor(b"b"), tensor(b"c")]) + DATA)
    with GGUF.open(tmp_path / "m.gguf") as file:
        assert file.raw("a").nbytes == 32 and len({t.offset for t in file.tensors.values()}) == 1


def small_file(path) -> bytes:
    """A whole file that ends with its last tensor's last byte."""
    write_gguf(path, {"general.architecture": "deepseek4", "words": ["a", "bc"], "numbers": [1, 2], "real": 0.5,
                      "yes": True, "general.alignment": 32},
               [("a", "Q8_0", (2, 32), np.ones((2, 34), np.uint8)), ("b", "F32", (8,), np.ones(8, np.float32))])
    return path.read_bytes()


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    whole = small_file(path)
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            GGUF.open(path)


def test_a_changed_byte_gives_a_file_or_an_error(tmp_path):
    """Every byte of the header, two values each from a seeded generator; and everything that still opens is read."""
    path, rng = tmp_path / "m.gguf", random.Random(8)
    whole = small_file(path)
    opened = 0
    for at in range(len(whole) - 128):
        for value in rng.sample(range(256), 2):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1:])
            opened += reads_wholly(path)
    assert 0 < opened < 2 * (len(whole) - 128)


def reads_wholly(path) -> bool:
    try:
        with GGUF.open(path) as file:
            assert len(dict(file.metadata)) == len(file.metadata)
            return all(file.raw(name).nbytes for name in file.tensors)
    except ModelFileError:
        return False


def test_billions_of_strings_in_a_hole_end_at_the_header_limit(tmp_path):
    """A sparse file can back any count with zeros: the walk over them must stop."""
    path = tmp_path / "m.gguf"
    path.write_bytes(header([text(b"k") + pack("<IIQ", 9, 8, 1 << 32)]))
    os.truncate(path, 80 << 30)
    with pytest.raises(ModelFileError, match=f"a header may have {MAX_HEADER_BYTES}"):
        GGUF.open(path)


def test_the_largest_header_takes_under_150_mb_as_strings(tmp_path):
    string = text("😀".encode())  # 80 bytes in memory and 8 in a list, for 12 in the file: the worst there is
    count = MAX_HEADER_BYTES // len(string) - 10
    (tmp_path / "m.gguf").write_bytes(header([text(b"k") + pack("<IIQ", 9, 8, count) + string * count]))
    with GGUF.open(tmp_path / "m.gguf") as file:
        strings = file.metadata["k"]
    assert len(strings) == count and sys.getsizeof(strings) + count * sys.getsizeof(strings[0]) < 150e6


@pytest.mark.parametrize("name, message", [
    ("missing.gguf", "no such file"), (".", "not a regular file"), ("pipe", "not a regular file"),
    ("nul\0byte", "cannot be read")])
def test_what_is_not_a_file_is_named(tmp_path, name, message):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match=message):
        GGUF.open(tmp_path / name)


def test_text_that_is_not_utf8_is_refused_when_it_is_asked_for(tmp_path):
    (tmp_path / "m.gguf").write_bytes(header([text(b"k") + pack("<IIQ", 9, 8, 1) + text(b"\xff")]))
    with GGUF.open(tmp_path / "m.gguf") as file, pytest.raises(ModelFileError, match="k at byte .* is not UTF-8"):
        file.metadata["k"]
