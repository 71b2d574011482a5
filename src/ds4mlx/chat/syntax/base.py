"""What a tool syntax has to offer, and what every reader of sampled text needs: control marks and partial markers.

Inside the readers an answer is one `str` in which each control token is a single lone surrogate. Decoded UTF-8 never
holds one, so the token `｜DSML｜` and the quoted characters `｜DSML｜` cannot be mistaken for each other.
"""
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ds4mlx.chat.events import ParserEvent
from ds4mlx.chat.messages import ToolCall
from ds4mlx.text.segments import CONTROL_LITERALS, Segment

BLANKS = " \t\n\r\f\v"

_MARKS = {literal: chr(0xD800 + number) for number, literal in enumerate(CONTROL_LITERALS)}
_LITERALS = {ord(mark): literal for literal, mark in _MARKS.items()}


class Region(Enum):
    """Where the next token falls; STRUCTURE and JSON_STRUCTURE are decoded greedily, the others as requested."""
    OUTSIDE = "O"         # reasoning and text
    STRUCTURE = "S"       # tags, and what may become the closing tag of a value
    STRING_BODY = "B"     # a string value, raw
    JSON_STRUCTURE = "J"  # a JSON value outside of its quotes
    JSON_STRING = "Q"     # and inside of them


class BlockState(Enum):
    OPEN = "open"
    COMPLETE = "complete"    # its closing tag was read
    MALFORMED = "malformed"  # nothing that follows can make it well-formed


class ToolBlock(Protocol):
    """One tool block while it is read, from right after its start marker."""
    state: BlockState
    complete_calls: int

    @property
    def region(self) -> Region: ...
    @property
    def unfinished(self) -> str: ...            # the end of what was read: what broke the block or is not complete yet
    @property
    def open_call(self) -> int | None: ...      # index of the call whose end has not been read

    def feed(self, text: str) -> int:
        """Reads on while the block is OPEN. Returns how many characters it took."""
        ...

    def end_token(self) -> None:
        """Marks the end of one sampled token; too many without progress make the block MALFORMED."""
        ...

    def take_events(self) -> list[ParserEvent]:
        """What happened since the last call: ToolCallStart, ToolArgsDelta, ToolCallEnd."""
        ...


class ToolSyntax(Protocol):
    """How one model family writes tool calls."""
    mark: str                  # of the control token in the tags of a canonical block
    canonical_start: str       # the marker that the model was trained on: its block is streamed as it comes

    @property
    def starts(self) -> Collection[str]: ...    # all markers; a block behind another one counts once it is complete

    def open_block(self, start: str, declared: Collection[str] | None) -> ToolBlock:
        """A reader for the block behind `start`. With `declared`, a call of any other tool makes it MALFORMED."""
        ...

    def render_calls(self, calls: Sequence[ToolCall]) -> list[Segment]:
        """The block that stands for `calls` in a prompt."""
        ...


def mark(literal: str) -> str:
    """The character that stands for a control token inside the readers; an unknown literal stays text."""
    return _MARKS.get(literal, literal)


def spelled(text: str) -> str:
    """Text as a person reads it: every mark replaced by its literal."""
    return text if text.isascii() else text.translate(_LITERALS)


def partial_tail(text: str, marker: str) -> int:
    """Length of the end of `text` that may become `marker`, whose first character does not occur in it again."""
    start = text.rfind(marker[0], max(0, len(text) - len(marker) + 1))
    return len(text) - start if start >= 0 and marker.startswith(text[start:]) else 0


@dataclass(frozen=True, slots=True)
class Scanned:
    text: str            # to be shown
    blanks: str = ""     # white space right before the marker
    marker: str = ""     # the marker found, "" for none
    rest: str = ""       # what follows the marker, not looked at


class MarkerScan:
    """Finds markers in text that comes in pieces, and holds back only what may still become one.

    With `hold_blanks`, white space is held as well until it is known whether a marker follows.
    """

    def __init__(self, markers: Collection[str], *, hold_blanks: bool) -> None:
        self._markers = tuple(markers)
        self._prefixes = frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))
        self._longest = max(map(len, markers), default=0)
        self._first = re.compile("[" + "".join(sorted({marker[0] for marker in markers})) + "]") if markers else None
        self._hold_blanks = hold_blanks
        self._blanks: list[str] = []
        self._tail = ""

    def feed(self, text: str) -> Scanned:
        text = self._tail + text
        at, marker = self._find(text)
        shown = self._release(text[:at])
        if not marker:
            self._tail = text[at:]
            return Scanned(shown)
        self._tail = ""
        return Scanned(shown, self.flush(), marker, text[at + len(marker):])

    def flush(self) -> str:
        """Everything held, which no longer can become a marker."""
        held = "".join(self._blanks) + self._tail
        self._blanks, self._tail = [], ""
        return held

    def _find(self, text: str) -> tuple[int, str]:
        """Where a marker stands, or may begin (""), or the end of the text."""
        for match in self._first.finditer(text) if self._first else ():
            at = match.start()
            found = next((marker for marker in self._markers if text.startswith(marker, at)), "")
            if found or (len(text) - at < self._longest and text[at:] in self._prefixes):
                return at, found
        return len(text), ""

    def _release(self, text: str) -> str:
        if not self._hold_blanks:
            return text
        shown = text.rstrip(BLANKS)
        if not shown:
            if text:
                self._blanks.append(text)
            return ""
        shown_with_blanks = "".join(self._blanks) + shown
        self._blanks = [text[len(shown):]] if len(shown) < len(text) else []
        return shown_with_blanks
