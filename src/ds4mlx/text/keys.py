"""A place in a prompt's key -> the place in its segments, to go on from a state that the key was matched by.

A key is longer than its text by the marks in it (`Tokenizer.key_bytes`).
"""
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from ds4mlx.text.segments import Segment, Text, Tokens
from ds4mlx.text.tokenizer import Tokenizer, key_marks, marked

_MARK = re.compile(b"\xff(\xff?)")


def key_with_ends(tokenizer: Tokenizer, segments: Sequence[Segment]) -> tuple[bytes, list[int]]:
    """The segments' key, `Tokenizer.key_bytes`, and where each segment ends in it."""
    pieces = [list(tokenizer.key_pieces(segment)) for segment in segments]
    key, ends = _spelled(piece for owned in pieces for piece in owned)
    return key, [0 if not count else ends[count - 1] for count in accumulate(map(len, pieces))]


def tokens_within(tokenizer: Tokenizer, ids: Iterable[int], key_bytes: int) -> int:
    """How many of the ids lie whole within the first `key_bytes` bytes of their key."""
    return tokens_within_each(tokenizer, ids, [key_bytes])[0]


def tokens_within_each(tokenizer: Tokenizer, ids: Iterable[int], places: Sequence[int]) -> list[int]:
    """The same for several places in the key."""
    ends = _piece_ends(tokenizer.literal(token) or tokenizer.token_bytes(token) for token in ids)
    return [bisect_right(ends, place) for place in places]


def after_key(tokenizer: Tokenizer, segments: Sequence[Segment], offset: int) -> list[Segment]:
    """What follows the first `offset` bytes of the segments' key. Replayed tokens stay what they are, but for one that
    the place lies in.

    Raises ValueError for a place inside a control token or a character: nothing can go on from there.
    """
    places = [(i, k, piece) for i, segment in enumerate(segments)
              for k, piece in enumerate(tokenizer.key_pieces(segment))]
    ends = _piece_ends(piece for _, _, piece in places)
    cut = bisect_right(ends, offset)
    if cut == len(ends):
        return []
    i, k, piece = places[cut]
    start, following = ends[cut - 1] if cut else 0, segments[i + 1:]
    if start == offset:
        return [*_from(tokenizer, segments[i], k), *following]
    if isinstance(piece, str):
        raise ValueError(f"byte {offset - start} of {piece!r} is no place to go on from")
    text = _text(tokenizer.key_bytes(segments), offset, ends[cut])
    return [Text(text), *(_from(tokenizer, segments[i], k + 1)), *following]


def _from(tokenizer: Tokenizer, segment: Segment, piece: int) -> list[Segment]:
    """A segment without its first pieces; only Tokens have more than one."""
    if not piece:
        return [segment]
    ids = segment.ids[piece:] if isinstance(segment, Tokens) else ()
    return [Tokens(ids, tokenizer.decode(ids))] if ids else []


def _text(key: bytes, start: int, end: int) -> str:
    """Ordinary bytes of a key as text. Raises ValueError when they begin behind a mark or are no whole characters."""
    if key[start - 1] == 0xFF:
        raise ValueError(f"byte {start} of the key lies behind a mark")
    return _MARK.sub(rb"\1", key[start:end]).decode()


def _piece_ends(pieces: Iterable[str | bytes]) -> list[int]:
    """Where each piece ends in the key of all. A mark goes with the byte that it precedes."""
    return _spelled(pieces)[1]


def _spelled(pieces: Iterable[str | bytes]) -> tuple[bytes, list[int]]:
    """The key of all, and where each piece ends in it."""
    key, ends = bytearray(), []
    for kind, group in groupby(pieces, type):
        owned = [piece.encode() if isinstance(piece, str) else piece for piece in group]
        stretch = b"".join(owned)
        marks = [] if kind is str else key_marks(stretch)
        start, length = len(key), 0
        for piece in owned:
            length += len(piece)
            ends.append(start + length + bisect_left(marks, length))
        key += marked(stretch, marks)
    return bytes(key), ends


class GrowingKey:
    """`key_bytes_of_ids` of a history that mostly grows: only what follows its last control token or line is spelled
    again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []   # up to a control token or behind a line: neither is inside a quoted literal
        self._key = b""

    def of(self, ids: Sequence[int]) -> bytes:
        """The key of these ids."""
        ids = list(ids)
        if ids[:len(self._known)] != self._known:
            self._known, self._key = [], b""
        known = next((i for i in range(len(ids), len(self._known), -1) if self._divides(ids, i)), None)
        if known is not None:
            self._key += self._tokenizer.key_bytes_of_ids(ids[len(self._known):known])
            self._known = ids[:known]
        return self._key + self._tokenizer.key_bytes_of_ids(ids[len(self._known):])

    def _divides(self, ids: list[int], at: int) -> bool:
        """Whether the keys of the ids before and behind a place are the halves of the whole key."""
        if at < len(ids) and self._tokenizer.literal(ids[at]):
            return True
        return self._tokenizer.literal(ids[at - 1]) is None and self._tokenizer.token_bytes(ids[at - 1]).endswith(b"\n")
