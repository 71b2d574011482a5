"""Request bodies: bytes of bounded size -> one JSON object."""
import asyncio
import json
import math
import zlib
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from ds4mlx.chat.json_text import Number
from ds4mlx.chat.messages import Json
from ds4mlx.errors import BadRequest

T = TypeVar("T")

MAX_NESTING = 256
INLINE_BYTES = 256 << 10  # larger bodies are decoded off the event loop


async def read_body(request: Request, max_bytes: int, read: Callable[[dict[str, Json]], T], *,
                    keep: bool = False) -> T:
    """What `read` makes of the body, a JSON object. A large body is parsed and read off the event loop.

    keep: leave its bytes, decompressed, in `request.state.body`.

    Raises BadRequest: 413 too large, 415 unknown encoding, 400 no JSON object; and what `read` raises.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise BadRequest(f"Content-Encoding is {encoding[:40]!r}, need gzip, deflate or none", status=415)
    raw = await _read(request, max_bytes)
    compressed = encoding not in ("identity", "")

    def decode() -> T:
        plain = _inflated(raw, encoding, max_bytes) if compressed else raw
        if keep:
            request.state.body = plain
        return read(parse_object(plain))

    return decode() if len(raw) <= INLINE_BYTES and not compressed else await asyncio.to_thread(decode)


def parse_object(raw: bytes) -> dict[str, Json]:
    """UTF-8 JSON text, a BOM allowed -> object; of a duplicate key the last value counts. Raises BadRequest."""
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_float=_finite, parse_constant=_refuse)
    except UnicodeDecodeError as fault:
        raise BadRequest(f"the body is not UTF-8 (byte {fault.start}); send JSON in UTF-8") from fault
    except json.JSONDecodeError as fault:
        raise BadRequest(f"the body is not JSON: {fault.msg} at line {fault.lineno}, column {fault.colno}") from fault
    except ValueError as fault:
        raise BadRequest("the body is not JSON: an integer has thousands of digits") from fault
    except RecursionError as fault:
        raise _too_deep() from fault
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:
        _check_nesting(value)
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _inflated(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """The decompressed body, never more than `max_bytes` of it in memory."""
    # "deflate" is a zlib stream by the standard, and a bare one from some clients.
    bare = encoding == "deflate" and not (raw[:1] and raw[0] & 0x0F == 8)
    inflater = zlib.decompressobj(-15 if bare else 15 if encoding == "deflate" else 31)
    try:
        data = inflater.decompress(raw, max_bytes + 1)
    except zlib.error as fault:
        raise BadRequest(f"the body is not {encoding} data ({fault})") from fault
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    if not inflater.eof:
        raise BadRequest(f"the {encoding} body is cut short")
    return data


def _check_nesting(value: Json) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise _too_deep()
        level = [item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent)
                 if isinstance(item, dict | list)]


def _finite(text: str) -> Number:
    """A float that goes into a prompt, as in a tool's schema, as it was spelled."""
    value = Number(text)
    if math.isinf(value):
        raise BadRequest(f"the body is not JSON: {text[:40]} is too large for a number")
    return value


def _refuse(constant: str) -> Json:
    raise BadRequest(f"the body is not JSON: {constant} is not a JSON value")


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the body is larger than {max_bytes >> 20} MiB, the limit; shorten it or raise --max-body-mb",
                      code="request_too_large", status=413)


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested deeper than {MAX_NESTING} levels; flatten it")
