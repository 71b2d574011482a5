"""Bytes and text as they may be printed: nothing in them moves a cursor or colours a terminal."""
import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escaped(piece: bytes) -> str:
    """Bytes as one line of text: `\\n`, `\\u200d` and the like for what does not print, `\\xe4` for half characters."""
    text = piece.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Text with its line breaks and tabs; `\\x1b` and the like for all else that does not print."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def harmless(text: str) -> str:
    """Text as it is but for control characters: `\\x1b` and the like where a terminal would obey."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
