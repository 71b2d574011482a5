"""The first 48 bytes of a head or an alias, and the key that follows them: enough to list a directory."""
import zlib
from dataclasses import dataclass
from struct import Struct
from typing import BinaryIO, ClassVar, Literal, Self

from ds4mlx.sessions.integrity import Corrupt, Footer, Foreign, Incomplete, check_footer, read_at

Reason = Literal["unknown", "cold", "continued", "evict", "shutdown", "agent-system", "agent-session"]
KeyKind = Literal["token-text", "thinking-visible", "responses-visible"]

REASONS: tuple[Reason, ...] = ("unknown", "cold", "continued", "evict", "shutdown", "agent-system", "agent-session")
KEY_FLAGS: dict[KeyKind, int] = {"token-text": 0, "responses-visible": 2, "thinking-visible": 4}
KEY_KINDS = {flags: kind for kind, flags in KEY_FLAGS.items()}
TOOLS, MARKED, ALIAS = 1, 16, 32    # a tool map follows; the key holds 0xFF marks; the file is an alias
KNOWN_FLAGS = TOOLS | 2 | 4 | MARKED | ALIAS
NO_PAYLOAD, CONTAINER = 0, 1
LENGTH_BYTES = 4                    # of the key's length
MOST_KEY_BYTES = 64 << 20           # a million tokens are some 5 MB of text
LEAST_BYTES = 84                    # header, an empty key, footer


@dataclass(frozen=True, slots=True)
class Header:
    """Hits and time of last use are written in place later: the CRC takes them for zero."""
    quant_bits: int
    reason: Reason
    flags: int
    payload_kind: int
    tokens: int
    hits: int
    ctx: int
    created: int        # Unix seconds
    last_used: int      # Unix seconds
    payload_bytes: int

    LAYOUT: ClassVar[Struct] = Struct("<3sBBBBBIIIIQQQ")
    MAGIC: ClassVar[bytes] = b"KVM"
    VERSION: ClassVar[int] = 1
    HITS_AT: ClassVar[int] = 12
    CRC_AT: ClassVar[int] = 20
    LAST_USED_AT: ClassVar[int] = 32

    @property
    def key_kind(self) -> KeyKind:
        return KEY_KINDS[self.flags & 6]

    def pack(self) -> bytes:
        raw = self.LAYOUT.pack(self.MAGIC, self.VERSION, self.quant_bits, REASONS.index(self.reason), self.flags,
                               self.payload_kind, self.tokens, self.hits, self.ctx, 0, self.created, self.last_used,
                               self.payload_bytes)
        return raw[:self.CRC_AT] + self.crc(raw).to_bytes(4, "little") + raw[self.CRC_AT + 4:]

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Raises Corrupt for a wrong magic or CRC, Foreign for a sound header that says what is not known here."""
        magic, version, bits, reason, flags, kind, tokens, hits, ctx, crc, *rest = cls.LAYOUT.unpack(raw)
        cls.refuse_other_versions(raw)
        if magic != cls.MAGIC or crc != cls.crc(raw):
            raise Corrupt("the header is damaged; the file will be set aside")
        if reason >= len(REASONS) or flags & ~KNOWN_FLAGS or flags & 6 not in KEY_KINDS or kind > CONTAINER:
            raise Foreign(f"reason {reason}, flags {flags:#04x} or payload kind {kind} is of a later version; "
                          "the file is left alone")
        return cls(bits, REASONS[reason], flags, kind, tokens, hits, ctx, *rest)

    @classmethod
    def refuse_other_versions(cls, raw: bytes) -> None:
        """Raises Foreign when `raw`, the beginning of a file of any length, is of another version of this format."""
        if raw.startswith(cls.MAGIC) and len(raw) > 3 and raw[3] != cls.VERSION:
            raise Foreign(f"the file is of version {raw[3]}, this program reads {cls.VERSION}; it is left alone")

    @classmethod
    def crc(cls, raw: bytes) -> int:
        """CRC-32 of the header with its mutable fields and its CRC taken as zero."""
        plain = bytearray(raw)
        plain[cls.HITS_AT:cls.HITS_AT + 4] = plain[cls.CRC_AT:cls.CRC_AT + 4] = bytes(4)
        plain[cls.LAST_USED_AT:cls.LAST_USED_AT + 8] = bytes(8)
        return zlib.crc32(plain)


@dataclass(frozen=True, slots=True)
class Front:
    """What every keyed file begins and ends with, checked."""
    header: Header
    key: bytes
    footer: Footer

    @property
    def nbytes(self) -> int:
        """Of header and key."""
        return Header.LAYOUT.size + LENGTH_BYTES + len(self.key)


def read_front(src: BinaryIO, size: int) -> Front:
    """Header, key and footer of a head, an alias or a session without a state (payload kind 0), of `size` bytes.

    Raises Incomplete, Corrupt, Foreign.
    """
    raw = read_at(src, 0, min(size, Header.LAYOUT.size + LENGTH_BYTES))
    Header.refuse_other_versions(raw)
    footer = check_footer(src, size, LEAST_BYTES)
    header = Header.unpack(raw[:Header.LAYOUT.size])
    count = int.from_bytes(raw[Header.LAYOUT.size:], "little")
    if count + header.payload_bytes > size - LEAST_BYTES:
        raise Incomplete(f"{count} bytes of key and {header.payload_bytes} of payload do not fit a file of {size}; "
                         "it will be set aside")
    if count > MOST_KEY_BYTES:
        raise Corrupt(f"the key has {count} bytes, at most {MOST_KEY_BYTES} are possible; the file will be set aside")
    key = read_at(src, len(raw), count)
    if zlib.crc32(key) != footer.text_crc:
        raise Corrupt("the CRC of the key is not the one in the footer; the file will be set aside")
    if (0xFF in key) != bool(header.flags & MARKED):
        raise Corrupt("the key's marks are not as the header says; the file will be set aside")
    return Front(header, key, footer)


def read_key_start(src: BinaryIO, size: int, count: int) -> bytes:
    """The first bytes of the key of a file, at most `count`, as they lie there. Raises Incomplete."""
    at = Header.LAYOUT.size
    length = int.from_bytes(read_at(src, at, LENGTH_BYTES), "little")
    return read_at(src, at + LENGTH_BYTES, max(0, min(count, length, size - LEAST_BYTES)))


def pack_key(key: bytes) -> bytes:
    """The text section."""
    return len(key).to_bytes(LENGTH_BYTES, "little") + key
