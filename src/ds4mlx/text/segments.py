"""What a prompt is made of: control tokens that only the renderer may place, and text that can never become one.

The seam between `chat`, which writes segments, and `text.tokenizer`, which turns them into ids.
Source: the safety rule that untrusted text is never tokenised with control recognition.
"""
import re
from collections.abc import Iterable
from dataclasses import dataclass

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}

CONTROL_LITERALS = (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML, LATEST_REMINDER, *TASKS.values())


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by its literal (a member of CONTROL_LITERALS)."""
    literal: str


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text, template or untrusted. Tokenised literally: no character sequence in it is special."""
    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids that the model sampled, replayed as they were; `text` is what they decode to."""
    ids: tuple[int, ...]
    text: str


Segment = Control | Text | Tokens


def rendered_text(segments: Iterable[Segment]) -> str:
    """The prompt as a person reads it: literals and text joined."""
    return "".join(s.literal if isinstance(s, Control) else s.text for s in segments)


def split_controls(text: str) -> list[Segment]:
    """Trusted text -> segments, its control literals becoming control tokens. Never for text from outside."""
    pieces = _CONTROL_LITERAL.split(text)  # text and literal by turns, text first and last
    return [Control(piece) if i % 2 else Text(piece) for i, piece in enumerate(pieces) if piece]


_CONTROL_LITERAL = re.compile("(" + "|".join(map(re.escape, CONTROL_LITERALS)) + ")")
