"""A checkpoint's head (.kvm) and its aliases (.kva), byte for byte: header, key, payload, tool map, footer.

Version history: 1, the first.
"""
import hashlib
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ds4mlx.sessions.container import (
    FORMAT, Container, check_arrays, compact, read_arrays, read_container, read_json, write_container)
from ds4mlx.sessions.header import (
    ALIAS, CONTAINER, KEY_FLAGS, MARKED, NO_PAYLOAD, TOOLS, Front, Header, KeyKind, Reason, pack_key, read_front)
from ds4mlx.sessions.identity import (
    SPAN_TOKENS, Identity, identity_metadata, metadata_int, parse_identity, parse_name)
from ds4mlx.sessions.integrity import (
    Bytes, Corrupt, Footer, Foreign, Image, Incomplete, Mismatch, array_bytes, read_at)
from ds4mlx.sessions.layout import Layout, RowCounts, head_arrays, row_counts
from ds4mlx.sessions.toolmap import (
    MOST_BLOCKS, MOST_SECTION_BYTES, BadToolMap, ToolBlock, pack_tool_map, parse_tool_map)


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
    assert len(arrays["tokens"]) == head.tokens
    tools = pack_tool_map(head.tool_map)
    payload = write_container(_metadata(head, arrays["tokens"]), arrays)
    created = head.created or int(time.time())
    header = Header(head.identity.quant_bits, head.reason, _flags(head.key, head.key_kind, TOOLS if tools else 0),
                    CONTAINER, head.tokens, head.hits, head.ctx, created, head.last_used or created,
                    sum(map(len, payload)))
    return _sealed([header.pack(), pack_key(head.key), *payload, tools], head.key, tools, payload[1])


def _metadata(head: Head, tokens: np.ndarray) -> dict[str, str]:
    """In the order of the format; "crc32" keeps its place for write_container."""
    out = {"format": FORMAT, **identity_metadata(head.identity), "frontier": str(head.tokens), "ctx": str(head.ctx),
           "key_kind": head.key_kind, "key_sha1": hashlib.sha1(head.key).hexdigest(),
           "tokens_sha1": hashlib.sha1(array_bytes(tokens)).hexdigest(), "crc32": "",
           "n_raw": compact(head.counts.raw), "n_comp": compact(head.counts.comp),
           "n_index": compact(head.counts.index), "writer": head.writer}
    if head.segments:
        out |= {"segments": compact(head.segments), "segment_tokens": str(SPAN_TOKENS)}
    return out


def _flags(key: bytes, kind: KeyKind, more: int) -> int:
    return KEY_FLAGS[kind] | (MARKED if 0xFF in key else 0) | more


def _sealed(parts: list[bytes | memoryview], key: bytes, tools: bytes, json: Bytes) -> Image:
    """The parts and the footer that belongs to them; the CRC-32 of nothing is the 0 that an absent section needs."""
    size = sum(map(len, parts)) + Footer.LAYOUT.size
    return Image((*parts, Footer(zlib.crc32(key), zlib.crc32(tools), zlib.crc32(json), size).pack()))


def read_head(src: BinaryIO, size: int, *, tools: bool = True, most_blocks: int = MOST_BLOCKS) -> StoredHead:
    """Everything but the arrays of a file of `size` bytes; `src` is any seekable file, best opened unbuffered.

    `tools=False` leaves the tool map unread. The caller compares the name with identity.head_name.
    Raises Incomplete, Corrupt, Foreign.
    """
    front = read_front(src, size)
    header = front.header
    if header.payload_kind != CONTAINER or header.flags & ALIAS:
        raise Foreign("the file holds text and no state; it is left alone")
    tools_at = front.nbytes + header.payload_bytes
    tools_bytes = size - Footer.LAYOUT.size - tools_at
    if tools_bytes and not header.flags & TOOLS or not tools_bytes and front.footer.tools_crc:
        raise Incomplete(f"{tools_bytes} bytes follow the payload; the sizes do not add up, the file will be set aside")
    container = read_container(src, front.nbytes, header.payload_bytes, front.footer.json_crc)
    blocks, fault = _read_tools(src, tools_at, tools_bytes, front.footer.tools_crc, most_blocks) if tools else ((), "")
    head = _parsed(front, container, blocks)
    return StoredHead(head, container, container.metadata.get("tokens_sha1", ""), tools_at - container.data_bytes,
                      size, fault)


def _read_tools(src: BinaryIO, at: int, count: int, crc: int, most_blocks: int) -> tuple[tuple[ToolBlock, ...], str]:
    """(blocks, why the section was ignored). The state is as good without it, so its faults are not the file's."""
    if not count:
        return (), ""
    if count > MOST_SECTION_BYTES:
        return (), f"the tool map has {count} bytes, at most {MOST_SECTION_BYTES} are read; it is ignored"
    raw = read_at(src, at, count)
    if zlib.crc32(raw) != crc:
        return (), "the CRC of the tool map is not the one in the footer; it is ignored"
    try:
        return parse_tool_map(raw, most_blocks), ""
    except BadToolMap as error:
        return (), str(error)


def _parsed(front: Front, container: Container, blocks: tuple[ToolBlock, ...]) -> Head:
    """The head that header, key and metadata agree on. Raises Corrupt where they do not."""
    header, said = front.header, container.metadata
    wanted = {"frontier": str(header.tokens), "ctx": str(header.ctx), "key_kind": header.key_kind,
              "key_sha1": hashlib.sha1(front.key).hexdigest()}
    for key, value in wanted.items():
        if said.get(key) != value:
            raise Corrupt(f"{key} is {said.get(key, '')[:64]!a}, header and key say {value}; the file will be set "
                          "aside")
    tokens = next(iter(container.arrays), None)
    if tokens is None or (tokens.name, tokens.dtype, tokens.shape) != ("tokens", "U32", (header.tokens,)):
        raise Corrupt(f"the first array is not the {header.tokens} tokens of the header; the file will be set aside")
    counts = RowCounts(*(_numbers(said, key) for key in ("n_raw", "n_comp", "n_index")))
    return Head(front.key, header.key_kind, header.reason, header.tokens, header.ctx,
                parse_identity(said, header.quant_bits), counts, _segments(said, header.tokens), blocks,
                header.created, header.last_used, header.hits, said.get("writer", ""))


def _numbers(metadata: Mapping[str, str], key: str) -> tuple[int, ...]:
    found = read_json(metadata.get(key, ""))
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < 1 << 32 for n in found):
        raise Corrupt(f"{key} is no list of row counts; the file will be set aside")
    return tuple(found)


def _segments(metadata: Mapping[str, str], tokens: int) -> tuple[str, ...]:
    if "segments" not in metadata:
        return ()
    found = read_json(metadata["segments"])
    if not isinstance(found, list) or not all(isinstance(n, str) and _SEGMENT.fullmatch(n) for n in found):
        raise Corrupt("segments is no list of segments' names; the file will be set aside")
    if metadata_int(metadata, "segment_tokens") != SPAN_TOKENS:
        raise Foreign(f"segments are not of {SPAN_TOKENS} tokens; the file is left alone")
    if len(found) * SPAN_TOKENS > tokens:
        raise Corrupt(f"{len(found)} segments cover more than the {tokens} tokens; the file will be set aside")
    return tuple(found)


def read_tokens(src: BinaryIO, stored: StoredHead, vocab_size: int | None = None) -> np.ndarray:
    """The token history, uint32 [tokens], checked by CRC and SHA-1 and to be below `vocab_size`. Raises Corrupt."""
    tokens = np.empty(stored.head.tokens, np.uint32)
    read_arrays(src, stored.data_at, stored.container, {"tokens": tokens})
    if hashlib.sha1(array_bytes(tokens)).hexdigest() != stored.tokens_sha1:
        raise Corrupt("the SHA-1 of the tokens is not the one in the JSON; the file will be set aside")
    if vocab_size is not None and len(tokens) and int(tokens.max()) >= vocab_size:
        raise Corrupt(f"the state names token {int(tokens.max())}, the vocabulary has {vocab_size}; "
                      "the file will be set aside")
    return tokens


def alias_image(alias: Alias) -> Image:
    """The bytes of an alias file."""
    target = alias.target.encode()
    created = alias.created or int(time.time())
    header = Header(alias.quant_bits, alias.reason, _flags(alias.key, alias.key_kind, ALIAS), NO_PAYLOAD, alias.tokens,
                    alias.hits, alias.ctx, created, alias.last_used or created, 0)
    return _sealed([header.pack(), pack_key(alias.key), len(target).to_bytes(2, "little"), target], alias.key, b"", b"")


def read_alias(src: BinaryIO, size: int) -> Alias:
    """An alias file of `size` bytes. Raises Incomplete, Corrupt, Foreign.

    No CRC covers the target: a damaged one is no head's name, or one that no file has. The caller compares the
    rest of its name, after the SHA-1, with that of the alias: they are of one model.
    """
    front = read_front(src, size)
    header = front.header
    if not header.flags & ALIAS or header.flags & TOOLS or header.payload_kind != NO_PAYLOAD or header.payload_bytes:
        raise Foreign("the file is no alias; it is left alone")
    count = size - Footer.LAYOUT.size - front.nbytes - 2
    raw = read_at(src, front.nbytes, 2 + count) if 0 < count <= MOST_NAME_BYTES else b""
    if int.from_bytes(raw[:2], "little") != count or front.footer.tools_crc or front.footer.json_crc:
        raise Incomplete(f"{count} bytes do not hold the target's name; the file will be set aside")
    target = parse_name(raw[2:].decode("ascii", "replace"))
    if target is None or (target.kind, target.quant_bits) != ("head", header.quant_bits):
        raise Corrupt(f"{raw[2:].decode('ascii', 'replace')!a} is no head of this model; the file will be set aside")
    return Alias(front.key, header.key_kind, raw[2:].decode(), header.reason, header.tokens, header.ctx,
                 header.quant_bits, header.created, header.last_used, header.hits)


def usage_writes(hits: int, now: int) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
    """(offset, bytes) to write in place when a head or an alias was used: the hit count and the time of last use."""
    return ((Header.HITS_AT, min(hits, 0xFFFFFFFF).to_bytes(4, "little")),
            (Header.LAST_USED_AT, max(now, 0).to_bytes(8, "little")))


def check_layout(stored: StoredHead, layout: Layout) -> None:
    """Raises Mismatch unless the file holds what the engine expects of a state of so many tokens and segments.

    After this and check_usable the arrays of the head may be allocated: they are as large as the file says they are.
    Those of its segments may be when the files exist.
    """
    head = stored.head
    check_arrays(stored.container, head_arrays(layout, head.tokens, len(head.segments)))
    if head.counts != (needed := row_counts(layout(head.tokens))):
        raise Mismatch(f"row counts are {head.counts}, need {needed}; the file is another model's")


def check_usable(head: Head, own: Identity, ctx: int, *, min_tokens: int, same_quant: bool = False) -> None:
    """Raises Mismatch, saying why, when a sound head is not for this model and this context limit.

    `same_quant`: refuse a state that another quantisation of the same checkpoint made.
    """
    theirs = head.identity
    for what in ("base_fp", "tokenizer_fp", "layout_fp", "engine_abi"):
        if (found := getattr(theirs, what)) != (needed := getattr(own, what)):
            raise Mismatch(f"{what} is {str(found)[:16]}, need {str(needed)[:16]}; another model's file is left alone")
    unnamed = theirs.base_fp == theirs.weights_fp or own.base_fp == own.weights_fp  # a model that names no source
    if unnamed and theirs.weights_fp != own.weights_fp:
        raise Mismatch("the weights are others, and no source says that they are equivalent; the file is left alone")
    if same_quant and theirs.quant_bits != own.quant_bits:
        raise Mismatch(f"made with {theirs.quant_bits}-bit experts, need {own.quant_bits}; the file is left alone")
    if head.tokens < min_tokens:
        raise Mismatch(f"{head.tokens} tokens are saved, at least {min_tokens} are worth loading")
    if head.ctx > ctx or head.tokens >= ctx:
        raise Mismatch(f"{head.tokens} tokens of a context of {head.ctx}, the limit here is {ctx}; raise it to load "
                       "them")


MOST_NAME_BYTES = 255
_SEGMENT = re.compile(r"[0-9a-f]{32}")
