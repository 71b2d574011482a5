"""Damaged cache files: every flipped byte and every missing end is noticed, or changes nothing that matters."""
import pytest
from toy_files import (
    BLOCKS, GOLDEN, alias_bytes, golden_bytes, head_bytes, open_alias, open_head, open_segment, segment_bytes, state)

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.header import Header
from ds4mlx.sessions.identity import parse_name
from ds4mlx.sessions.integrity import Corrupt, Foreign, Incomplete

USAGE = {*range(Header.HITS_AT, Header.HITS_AT + 4), *range(Header.LAST_USED_AT, Header.LAST_USED_AT + 8)}
WITH_TOOLS = head_bytes(state(3), tool_map=BLOCKS)
SEGMENT, ALIAS, GOLD = segment_bytes(state(2048)), alias_bytes(), golden_bytes()
FILES = {"golden": (GOLD, open_head), "tools": (WITH_TOOLS, open_head), "segment": (SEGMENT, open_segment),
         "alias": (ALIAS, open_alias)}


def flipped(data, at, mask):
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1:]


def flips(data, opener, mask):
    """(position, what the file with that byte flipped says), where it is not refused. Mask 0: another bit each time."""
    for at in range(len(data)):
        try:
            yield at, opener(flipped(data, at, mask or 1 << at % 8))
        except CheckpointError:
            pass


@pytest.mark.parametrize("mask", [0, 0xFF])
def test_every_flipped_byte_of_the_golden_file_is_refused_but_those_of_its_usage(mask):
    original = open_head(GOLD)
    assert {at for at, found in flips(GOLD, open_head, mask) if found == original} == USAGE
    assert {at for at, found in flips(GOLD, open_head, mask) if found != original} == set()


@pytest.mark.parametrize("mask", [0, 0xFF])
def test_every_flipped_byte_of_a_segment_is_refused(mask):
    assert list(flips(SEGMENT, open_segment, mask)) == []


@pytest.mark.parametrize("mask", [0, 0xFF])
def test_a_damaged_tool_map_is_ignored_and_the_state_beside_it_kept(mask):
    head, arrays, _ = open_head(WITH_TOOLS)
    ignored = {at for at, found in flips(WITH_TOOLS, open_head, mask) if found[2]}
    assert ignored == set(range(WITH_TOOLS.index(b"KTM"), len(WITH_TOOLS) - 32))
    assert all(found[1] == arrays and found[0].tool_map in ((), head.tool_map)
               for _, found in flips(WITH_TOOLS, open_head, mask))


@pytest.mark.parametrize("mask", [0, 0xFF])
def test_a_flipped_byte_of_an_alias_is_refused_or_names_a_file_that_is_not_there(mask):
    original = open_alias(ALIAS)
    other = {found.target for at, found in flips(ALIAS, open_alias, mask) if at not in USAGE}
    assert original.target not in other and all(parse_name(target).kind == "head" for target in other)
    assert all(found == original for at, found in flips(ALIAS, open_alias, mask) if at in USAGE)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_lost_its_end_is_incomplete_at_every_length(name):
    data, opener = FILES[name]
    for length in range(len(data)):
        with pytest.raises(Incomplete):
            opener(data[:length])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [b"\0", b"KVE1" + bytes(28)])
def test_a_file_with_something_behind_its_end_is_incomplete(name, more):
    data, opener = FILES[name]
    with pytest.raises(Incomplete):
        opener(data + more)


@pytest.mark.parametrize("mutation", GOLDEN["mutations"], ids=lambda m: str(m["at"]))
def test_the_published_mutations_have_their_published_effects(mutation):
    data = flipped(GOLD, mutation["at"], 0x01)
    if mutation["effect"].startswith("none"):
        assert open_head(data) == open_head(GOLD)
    else:
        with pytest.raises(Incomplete if "incomplete" in mutation["effect"] else Corrupt):
            open_head(data)


def test_a_file_of_zeros_is_incomplete_and_not_left_alone_as_foreign():
    for opener in (open_head, open_segment, open_alias):
        with pytest.raises(Incomplete):
            opener(bytes(4096))
    with pytest.raises(Foreign):
        open_head(b"KVM\x09 a later version, whatever follows")
