"""KTM: the tool blocks that the model sampled in a saved history, so that they can be replayed after a restart.

A section that breaks a limit is ignored whole; the state beside it is as good as before.
"""
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

import numpy as np

from ds4mlx.errors import CheckpointError

START = Struct("<3sBI")    # magic, version, blocks
BLOCK = Struct("<HIII")    # call ids, bytes of lead, bytes of text, tokens; then ids (u16 length, bytes), lead, text
MAGIC, VERSION = b"KTM", 1
MOST_ID_BYTES, MOST_TEXT_BYTES = 256, 16 << 20
MOST_SECTION_BYTES = 32 << 20   # a million tokens of nothing but tool calls take some 10 MB
MOST_BLOCKS = 400_000           # 4 * the default of --tool-memory-max-ids


class BadToolMap(CheckpointError):
    """The section cannot be used; say so and go on without it."""


@dataclass(frozen=True, slots=True)
class ToolBlock:
    """One sampled block of tool calls."""
    call_ids: tuple[str, ...]   # in order of the calls
    lead: str                   # between the content as clients see it and the first whole token of the block
    text: str                   # from the separator through the closing tag
    ids: tuple[int, ...]        # tokens of `text`


def pack_tool_map(blocks: Iterable[ToolBlock]) -> bytes:
    """The section; blocks that a reader would refuse, or that no longer fit, are left out. b"" when none is left."""
    packed: list[bytes] = []
    room = MOST_SECTION_BYTES - START.size
    for block in blocks:
        raw = _pack(block)
        if raw is not None and len(raw) <= room and len(packed) < MOST_BLOCKS:
            packed.append(raw)
            room -= len(raw)
    return START.pack(MAGIC, VERSION, len(packed)) + b"".join(packed) if packed else b""


def _pack(block: ToolBlock) -> bytes | None:
    """The block as stored; None for one that a reader would refuse."""
    try:
        names = [name.encode() for name in block.call_ids]
        lead, text = block.lead.encode(), block.text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return None
    if len(names) >= 1 << 16 or not all(1 <= len(name) <= MOST_ID_BYTES for name in names):
        return None
    if max(len(lead), len(text)) > MOST_TEXT_BYTES:
        return None
    ids = np.array(block.ids, "<u4").tobytes()
    listed = b"".join(len(name).to_bytes(2, "little") + name for name in names)
    return BLOCK.pack(len(names), len(lead), len(text), len(block.ids)) + listed + lead + text + ids


def parse_tool_map(raw: bytes, most_blocks: int = MOST_BLOCKS) -> tuple[ToolBlock, ...]:
    """Every block of a section. Raises BadToolMap."""
    cursor = _Cursor(raw)
    magic, version, count = START.unpack(cursor.take(START.size))
    if (magic, version) != (MAGIC, VERSION):
        raise BadToolMap(f"the tool map is {magic!r} version {version}, need {MAGIC!r} {VERSION}; it is ignored")
    if count > most_blocks:
        raise BadToolMap(f"the tool map has {count} blocks, at most {most_blocks} are read; it is ignored")
    blocks = tuple(_parse(cursor) for _ in range(count))
    if cursor.at != len(raw):
        raise BadToolMap(f"{len(raw) - cursor.at} bytes follow the last block of the tool map; it is ignored")
    return blocks


def _parse(cursor: "_Cursor") -> ToolBlock:
    names, lead_bytes, text_bytes, tokens = BLOCK.unpack(cursor.take(BLOCK.size))
    if max(lead_bytes, text_bytes) > MOST_TEXT_BYTES:
        raise BadToolMap(f"a block of the tool map has {text_bytes} bytes of text; it is ignored")
    call_ids = tuple(cursor.text(cursor.length(), "id") for _ in range(names))
    lead, text = cursor.text(lead_bytes, "lead"), cursor.text(text_bytes, "text")
    return ToolBlock(call_ids, lead, text, tuple(np.frombuffer(cursor.take(4 * tokens), "<u4").tolist()))


class _Cursor:
    """Reads a section from its beginning; nothing is taken that is not there."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, count: int) -> bytes:
        if count > len(self.raw) - self.at:
            raise BadToolMap(f"the tool map ends at byte {len(self.raw)}, {count} more are announced; it is ignored")
        self.at += count
        return self.raw[self.at - count:self.at]

    def length(self) -> int:
        """Of a call's id."""
        count = int.from_bytes(self.take(2), "little")
        if not 1 <= count <= MOST_ID_BYTES:
            raise BadToolMap(f"an id of the tool map has {count} bytes, at most {MOST_ID_BYTES} fit; it is ignored")
        return count

    def text(self, count: int, what: str) -> str:
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError:
            raise BadToolMap(f"the {what} of a block of the tool map is no UTF-8; it is ignored") from None
