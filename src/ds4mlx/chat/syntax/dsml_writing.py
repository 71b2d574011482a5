"""Tool calls -> the canonical DSML block, in the spelling that the model was trained on.

`｜DSML｜` is always a control token; tag names, attributes and values are text.
"""
import re
from collections.abc import Iterator, Sequence

from ds4mlx.chat import json_text
from ds4mlx.chat.messages import Json, ToolCall
from ds4mlx.text.segments import DSML, Control, Segment, Text

MAX_DEPTH = 128  # of lists and objects in arguments; what nests deeper is written as raw text

CLOSING_TAG = f"</{DSML}parameter>"
_SURROGATE = re.compile("[\ud800-\udfff]")


def render_calls(calls: Sequence[ToolCall]) -> list[Segment]:
    """The canonical block of one assistant turn, from its leading blank line to its closing tag; [] without calls."""
    if not calls:
        return []
    lines = [("<", "tool_calls>"), *(part for call in calls for part in _call(call)), ("\n</", "tool_calls>")]
    segments: list[Segment] = []
    text = "\n\n"
    for before_mark, after_mark in lines:
        segments += Text(text + before_mark), Control(DSML)
        text = after_mark
    return [*segments, Text(text)]


def _call(call: ToolCall) -> Iterator[tuple[str, str]]:
    """One call as what stands before and after each control token, with the line end that precedes it."""
    arguments = _arguments(call.arguments)
    yield "\n<", f'invoke name="{attribute(call.name)}">'
    for key, value in arguments.items():
        yield "\n<", f'parameter name="{attribute(key)}" {_value(value)}'
        yield "</", "parameter>"
    yield "\n</" if arguments else "\n\n</", "invoke>"


def _arguments(source: str) -> dict[str, Json]:
    """The parameters to write. What is not an object, or not JSON at all, is one parameter named `arguments`."""
    try:
        value = json_text.parse(source)
        _check_depth(value)
    except (ValueError, RecursionError):
        value = source
    return value if isinstance(value, dict) else {"arguments": value}


def _check_depth(value: Json) -> None:
    """Raises ValueError when lists and objects nest deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level if isinstance(node, list | dict)
                 for child in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return
    raise ValueError(f"arguments nest deeper than {MAX_DEPTH} levels")


def _value(value: Json) -> str:
    """The `string` attribute, the end of the opening tag, and the parameter's body."""
    if isinstance(value, str):
        return 'string="true">' + _whole(value).replace(CLOSING_TAG, "&lt;" + CLOSING_TAG[1:])
    return 'string="false">' + _whole(json_text.spell(value)).replace(CLOSING_TAG, "\\u003c" + CLOSING_TAG[1:])


def attribute(text: str) -> str:
    """The value of an attribute as it is written between quotes."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return _whole(text)


def _whole(text: str) -> str:
    """A `\\ud83d` escape in the arguments can leave half a character, which no prompt can hold."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
