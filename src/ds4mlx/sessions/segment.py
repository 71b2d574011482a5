"""A segment file (.kvs): the append-only rows of one span of 2048 tokens, written once and shared.

32-byte header, safetensors container, footer.
"""
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import BinaryIO

import numpy as np

from ds4mlx.sessions.container import FORMAT, Container, read_container, write_container
from ds4mlx.sessions.identity import SPAN_TOKENS, Identity, identity_metadata, metadata_int, parse_identity
from ds4mlx.sessions.integrity import Corrupt, Footer, Foreign, Image, Incomplete, check_footer, read_at

HEADER = Struct("<3sBIIQQI")  # magic, version, span, tokens, payload bytes, creation time, CRC-32 of the rest
MAGIC, VERSION = b"KVS", 1
LEAST_BYTES = HEADER.size + Footer.LAYOUT.size


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
    metadata = {"format": FORMAT, **identity_metadata(segment.identity), "quant_bits": str(segment.identity.quant_bits),
                "segment": segment.name, "crc32": "", "writer": segment.writer}
    payload = write_container(metadata, rows)
    payload_bytes = sum(map(len, payload))
    header = HEADER.pack(MAGIC, VERSION, segment.span, segment.tokens, payload_bytes,
                         segment.created or int(time.time()), 0)[:-4]
    header += zlib.crc32(header).to_bytes(4, "little")
    footer = Footer(0, 0, zlib.crc32(payload[1]), LEAST_BYTES + payload_bytes)
    return Image((header, *payload, footer.pack()))


def read_segment(src: BinaryIO, size: int) -> StoredSegment:
    """Everything but the rows of a file of `size` bytes: container.check_arrays and read_arrays do the rest.

    The caller compares `segment.name` with the file's. Raises Incomplete, Corrupt, Foreign.
    """
    raw = read_at(src, 0, min(size, HEADER.size))
    if raw.startswith(MAGIC) and raw[3:4] not in (b"", bytes([VERSION])):
        raise Foreign(f"the segment is of version {raw[3]}, this program reads {VERSION}; it is left alone")
    footer = check_footer(src, size, LEAST_BYTES)
    magic, _, span, tokens, payload_bytes, created, crc = HEADER.unpack(raw)
    if magic != MAGIC or crc != zlib.crc32(raw[:-4]):
        raise Corrupt("the segment's header is damaged; the file will be set aside")
    if tokens != SPAN_TOKENS:
        raise Foreign(f"the segment covers {tokens} tokens, this program reads {SPAN_TOKENS}; it is left alone")
    if LEAST_BYTES + payload_bytes != size:
        raise Incomplete(f"a payload of {payload_bytes} bytes does not make a file of {size}; it will be set aside")
    if footer.text_crc or footer.tools_crc:
        raise Corrupt("the footer tells of sections that a segment does not have; the file will be set aside")
    container = read_container(src, HEADER.size, payload_bytes, footer.json_crc)
    identity = parse_identity(container.metadata, metadata_int(container.metadata, "quant_bits"))
    segment = Segment(container.metadata.get("segment", ""), span, identity, created, tokens,
                      container.metadata.get("writer", ""))
    return StoredSegment(segment, container, size - Footer.LAYOUT.size - container.data_bytes, size)
