"""Hostile cache files, made to get past the CRCs, against every reader of the format.

    python tests/sessions/fuzz_format.py --minutes 10

A file may be refused with a CheckpointError or read; nothing else may come out, and what reading allocates is bounded
by the file's size. `test_format_hostile.py` runs the same for a second with the other tests.
"""
import argparse
import json
import time
import tracemalloc
import zlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_files import (
    BLOCKS, alias_bytes, golden_bytes, head_bytes, open_alias, open_head, open_segment, segment_bytes, state)

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.header import Header
from ds4mlx.sessions.integrity import Footer

OPENERS = (open_head, open_segment, open_alias)
SEEDS = (golden_bytes(), head_bytes(state(3), tool_map=BLOCKS), head_bytes(state(2050), spans=1),
         segment_bytes(state(2048)), alias_bytes())
BOMBS = (b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"KTM\1", b"KVE1")
# Objects of parsed JSON take up to some 40 bytes for each of theirs, tracebacks and caches a constant.
MOST_TIMES, MOST_MORE = 64, 1 << 20

edges = st.sampled_from([0, 1, 2, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
json_values = st.recursive(st.none() | st.booleans() | st.integers() | edges | st.floats() | st.text(max_size=20),
                           lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
                           max_leaves=9)


@st.composite
def edited(draw, data, first=0):
    """`data` after a few edits from `first` on: bytes set, numbers of 1 to 8 bytes set to extremes, pieces put in."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at, count = draw(st.integers(first, len(data))), draw(st.sampled_from([1, 2, 4, 8]))
        number = edges.map(lambda n: (n % 256**count).to_bytes(count, "little"))
        piece = draw(st.one_of(number, number, st.binary(min_size=1, max_size=9), st.sampled_from(BOMBS)))
        data[at:at + draw(st.sampled_from([len(piece)] * 5 + [0, 1]))] = piece
    return bytes(data)


@st.composite
def redescribed(draw):
    """A sound file whose JSON has one value exchanged, sizes and CRCs set to match."""
    data = draw(st.sampled_from(SEEDS[:4]))
    start, end = payload_of(data)
    root = json.loads(data[start + 8:end])
    metadata = root["__metadata__"]
    where = draw(st.sampled_from([root, metadata, metadata, *list(root.values())[1:]]))
    key = draw(st.sampled_from(list(where)))
    old = where[key]
    if isinstance(old, list) and draw(st.booleans()):
        old[draw(st.integers(0, len(old) - 1))] = draw(json_values)
    elif draw(st.booleans()):
        where[key] = draw(st.sampled_from([str, json.dumps]))(draw(json_values))
    else:
        where[key] = draw(json_values | st.sampled_from(list(where.values())))
    raw = json.dumps(root).encode()
    out = data[:start] + len(raw).to_bytes(8, "little") + raw + data[end:]
    at = 12 if data.startswith(b"KVS") else 40
    payload_bytes = int.from_bytes(data[at:at + 8], "little") + len(out) - len(data)
    return out[:at] + payload_bytes.to_bytes(8, "little") + out[at + 8:]


damaged = st.sampled_from(SEEDS).flatmap(edited)
tooled = edited(SEEDS[1], SEEDS[1].index(b"KTM"))
files = st.one_of(st.binary(max_size=300), damaged, damaged.map(lambda d: seal(d)), tooled.map(lambda d: seal(d)),
                  redescribed().map(lambda d: seal(d)), redescribed().flatmap(edited).map(lambda d: seal(d)))


def payload_of(data):
    """Where the length of a sound file's JSON stands, and where its array data begins."""
    start = data.index(b'{"__metadata__"') - 8
    return start, start + 8 + int.from_bytes(data[start:start + 8], "little")


def seal(data):
    """`data` with the CRCs of its sections and the sizes in its footer set to what they should be."""
    out = bytearray(data)
    if len(out) < 96:
        return data
    if out.startswith(b"KVS"):
        start, key, payload = 32, b"", int.from_bytes(out[12:20], "little")
        out[28:32] = zlib.crc32(out[:28]).to_bytes(4, "little")
    else:
        start = 52 + int.from_bytes(out[48:52], "little")
        key, payload = bytes(out[52:start]), int.from_bytes(out[40:48], "little")
        out[20:24] = Header.crc(bytes(out[:48])).to_bytes(4, "little")
    raw = bytes(out[start + 8:start + 8 + int.from_bytes(out[start:start + 8], "little")]) if payload else b""
    tools = bytes(out[start + payload:-32]) if out[6] & 1 and not out.startswith(b"KVS") else b""
    out[-32:] = Footer(zlib.crc32(key), zlib.crc32(tools), zlib.crc32(raw), len(out)).pack()
    return bytes(out)


def survives(data):
    """Opens `data` as everything that it could be. Raises what no reader may raise."""
    for opener in OPENERS:
        tracemalloc.start()
        try:
            opener(data)
        except CheckpointError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= MOST_TIMES * len(data) + MOST_MORE, f"{peak} bytes for a file of {len(data)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    end, tried, slowest = time.monotonic() + parser.parse_args().minutes * 60, 0, 0.0

    @settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(files)
    def batch(data):
        nonlocal tried, slowest
        start = time.monotonic()
        survives(data)
        tried, slowest = tried + 1, max(slowest, time.monotonic() - start)

    while time.monotonic() < end:
        batch()
        print(f"{tried} files, slowest {slowest * 1000:.0f} ms, no fault", flush=True)


if __name__ == "__main__":
    main()
