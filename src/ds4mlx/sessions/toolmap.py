"""KTM: the tool blocks that the model sampled in a saved history, so that they can be replayed after a restart.

A section that breaks a limit is ignored whole; the state beside it is as good as before.
"""
from collections.abc import Iterable
from dataclasses import dataclass

from ds4mlx.errors import CheckpointError

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
    raise NotImplementedError


def parse_tool_map(raw: bytes, most_blocks: int = MOST_BLOCKS) -> tuple[ToolBlock, ...]:
    """Every block of a section. Raises BadToolMap."""
    raise NotImplementedError
