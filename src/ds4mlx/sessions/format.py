"""A checkpoint's head (.kvm) and its aliases (.kva), byte for byte: header, key, payload, tool map, footer.

Version history: 1, the first.
"""
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np

from ds4mlx.sessions.container import Container
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.integrity import Image
from ds4mlx.sessions.layout import RowCounts
from ds4mlx.sessions.toolmap import MOST_BLOCKS, ToolBlock

Reason = Literal["unknown", "cold", "continued", "evict", "shutdown", "agent-system", "agent-session"]
KeyKind = Literal["token-text", "thinking-visible", "responses-visible"]


@dataclass(frozen=True, slots=True)
class Head:
    """What a checkpoint is, without its arrays."""
    key: bytes                  # the rendered text that selects it
    key_kind: KeyKind
    reason: Reason
    tokens: int                 # frontier: tokens that the state covers
    ctx: int                    # context limit it was made under
    identity: Identity
    counts: RowCounts           # of the whole state, rows in segments included
    segments: tuple[str, ...] = ()          # names of the spans that lie in segments, the first ones in order
    tool_map: tuple[ToolBlock, ...] = ()
    created: int = 0            # Unix seconds; 0 on writing means now
    last_used: int = 0          # Unix seconds; 0 on writing means as created
    hits: int = 0
    writer: str = "ds4mlx"      # program and version


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A head file that was opened and found sound, its arrays not read yet."""
    head: Head
    container: Container
    tokens_sha1: str
    data_at: int                # offset of the arrays in the file
    file_bytes: int
    tool_map_fault: str = ""    # why the file's tool map was ignored; "" when it was not


@dataclass(frozen=True, slots=True)
class Alias:
    """A further key of a head. `target`: the head's file name, in the same directory."""
    key: bytes
    key_kind: KeyKind
    target: str
    reason: Reason
    tokens: int
    ctx: int
    quant_bits: int
    created: int = 0
    last_used: int = 0
    hits: int = 0


def head_image(head: Head, arrays: Mapping[str, np.ndarray]) -> Image:
    """The bytes of a head file. `arrays` in storage order, with `tokens` uint32 first; see layout.head_views.

    Image.nbytes is the exact size before anything is written; Image.write streams it.
    """
    raise NotImplementedError


def read_head(src: BinaryIO, size: int, *, tools: bool = True, most_blocks: int = MOST_BLOCKS) -> StoredHead:
    """Everything but the arrays of a file of `size` bytes; `src` is any seekable file, best opened unbuffered.

    `tools=False` leaves the tool map unread. The caller compares the name with identity.head_name.
    Raises Incomplete, Corrupt, Foreign.
    """
    raise NotImplementedError


def read_tokens(src: BinaryIO, stored: StoredHead, vocab_size: int | None = None) -> np.ndarray:
    """The token history, uint32 [tokens], checked by CRC and SHA-1 and to be below `vocab_size`. Raises Corrupt."""
    raise NotImplementedError


def alias_image(alias: Alias) -> Image:
    """The bytes of an alias file."""
    raise NotImplementedError


def read_alias(src: BinaryIO, size: int) -> Alias:
    """An alias file of `size` bytes. Raises Incomplete, Corrupt, Foreign."""
    raise NotImplementedError


def usage_writes(hits: int, now: int) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
    """(offset, bytes) to write in place when a head or an alias was used: the hit count and the time of last use."""
    raise NotImplementedError


def check_usable(head: Head, own: Identity, ctx: int, *, min_tokens: int, same_quant: bool = False) -> None:
    """Raises Mismatch, saying why, when a sound head is not for this model and this context limit."""
    raise NotImplementedError
