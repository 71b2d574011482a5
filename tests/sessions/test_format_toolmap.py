"""The tool map: sampled blocks beside a state, as they were sampled, within limits."""
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_files import BLOCKS, head_bytes, open_head, state

from ds4mlx.sessions.toolmap import (
    BLOCK, MOST_ID_BYTES, MOST_TEXT_BYTES, START, BadToolMap, ToolBlock, pack_tool_map, parse_tool_map)

texts = st.text(st.characters(exclude_categories=["Cs"]))
blocks = st.builds(ToolBlock, st.lists(texts.filter(lambda t: 1 <= len(t.encode()) <= MOST_ID_BYTES)).map(tuple),
                   texts, texts, st.lists(st.integers(0, 2**32 - 1)).map(tuple))


@given(st.lists(blocks, min_size=1).map(tuple))
def test_blocks_are_read_as_they_were_written(several):
    assert parse_tool_map(pack_tool_map(several)) == several


def test_no_blocks_take_no_room():
    assert pack_tool_map([]) == b""


@pytest.mark.parametrize("block", [
    ToolBlock(("",), "", "text", ()), ToolBlock(("i" * 257,), "", "text", ()), ToolBlock(("a",), "", "\ud800", ()),
    ToolBlock(("a",), "", "t" * (MOST_TEXT_BYTES + 1), ()), ToolBlock(("a",) * 65536, "", "text", ())])
def test_a_block_that_no_reader_would_take_is_not_written(block):
    assert parse_tool_map(pack_tool_map([BLOCKS[0], block, BLOCKS[1]])) == BLOCKS


def section(count=1, ids=0, lead=0, text=0, tokens=0, rest=b""):
    return START.pack(b"KTM", 1, count) + BLOCK.pack(ids, lead, text, tokens) + rest


@pytest.mark.parametrize("raw", [
    b"", b"KTM\1", START.pack(b"KTM", 2, 0), START.pack(b"KTX", 1, 0), section(count=2), section(count=0),
    section(count=2**32 - 1), section(ids=65535), section(lead=2**32 - 1), section(text=2**32 - 1),
    section(tokens=2**32 - 1), section(ids=1, rest=b"\0\0"), section(ids=1, rest=b"\1\1" + bytes(257)),
    section(text=1, rest=b"\xff"), section(rest=b"more")])
def test_a_section_that_breaks_a_limit_is_refused(raw):
    with pytest.raises(BadToolMap):
        parse_tool_map(raw)


def test_more_blocks_than_the_reader_keeps_are_ignored():
    assert len(parse_tool_map(pack_tool_map(BLOCKS), most_blocks=2)) == 2
    with pytest.raises(BadToolMap, match="2 blocks, at most 1"):
        parse_tool_map(pack_tool_map(BLOCKS), most_blocks=1)


def test_every_cut_of_a_section_is_refused():
    raw = pack_tool_map(BLOCKS)
    for length in range(len(raw)):
        with pytest.raises(BadToolMap):
            parse_tool_map(raw[:length])


def test_a_head_keeps_its_tool_map_beside_the_state():
    head, _, fault = open_head(head_bytes(state(3), tool_map=BLOCKS))
    assert (head.tool_map, fault) == (BLOCKS, "")
