"""What clients add to a conversation that must not reach the prompt: halves of characters, rotating header lines."""
import re
from dataclasses import replace

from ds4mlx.chat.messages import Conversation, Message, TextPart

_SURROGATE = re.compile("[\ud800-\udfff]")
_BILLING = "x-anthropic-billing-header:"
_BILLING_FIRST = re.compile(rf"\A(?:{_BILLING}[^\n]*(?:\n|\Z))+")


def clean_text(text: str) -> str:
    """Text with U+FFFD for each lone surrogate: JSON can spell them, UTF-8 cannot."""
    return _SURROGATE.sub("\ufffd", text)


def canonical(conversation: Conversation) -> Conversation:
    """The conversation without the billing headers of its system messages.

    Their nonce changes with every request and stands at the very start, so that no two prompts would share a prefix.
    """
    messages = tuple(_without_billing(m) if m.role == "system" else m for m in conversation.messages)
    return replace(conversation, messages=messages)


def _without_billing(message: Message) -> Message:
    parts = (TextPart(drop_billing(p.text)) if isinstance(p, TextPart) else p for p in message.parts)
    return replace(message, parts=tuple(p for p in parts if not isinstance(p, TextPart) or p.text))


def drop_billing(text: str) -> str:
    """One system text without billing lines at its start and end; "" when it is nothing but such a header."""
    text = _BILLING_FIRST.sub("", text)
    newline = "\n" if text.endswith("\n") else ""
    end = len(text) - len(newline)
    while (start := text.rfind("\n", 0, end)) >= 0 and text.startswith(_BILLING, start + 1):
        end = start  # line by line: a pattern that may begin at each of them takes quadratic time
    text = text[:end] + newline
    return "" if text.startswith("x-anthropic-") else text
