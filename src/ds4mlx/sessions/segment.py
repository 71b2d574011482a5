"""A segment file (.kvs): the append-only rows of one span of 2048 tokens, written once and shared.

32-byte header, safetensors container, footer.
"""
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ds4mlx.sessions.container import Container
from ds4mlx.sessions.identity import SPAN_TOKENS, Identity
from ds4mlx.sessions.integrity import Image


@dataclass(frozen=True, slots=True)
class Segment:
    """What a segment is, without its rows."""
    name: str               # 32 hex digits, see identity.chain_hashes
    span: int               # covers tokens [2048 span, 2048 (span + 1))
    identity: Identity      # of the model that wrote it
    created: int = 0        # Unix seconds; 0 on writing means now
    tokens: int = SPAN_TOKENS
    writer: str = "ds4mlx"


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment file that was opened and found sound, its rows not read yet."""
    segment: Segment
    container: Container
    data_at: int            # offset of the rows in the file
    file_bytes: int


def segment_image(segment: Segment, rows: Mapping[str, np.ndarray]) -> Image:
    """The bytes of the file. `rows` in storage order."""
    raise NotImplementedError


def read_segment(src: BinaryIO, size: int) -> StoredSegment:
    """Everything but the rows of a file of `size` bytes: container.check_arrays and read_arrays do the rest.

    The caller compares `segment.name` with the file's. Raises Incomplete, Corrupt, Foreign.
    """
    raise NotImplementedError
