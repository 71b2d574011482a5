"""DSML, the tool syntax of DeepSeek V4: the spellings of a block that are accepted, and the one that is written.

Models spell the mark `｜DSML｜` in several ways. Only the control token is sure to be meant; behind any other
spelling may stand a document that merely shows such tags.
"""
from collections.abc import Collection, Sequence

from ds4mlx.chat.messages import ToolCall
from ds4mlx.chat.syntax.base import mark
from ds4mlx.chat.syntax.dsml_block import DsmlBlock
from ds4mlx.chat.syntax.dsml_writing import render_calls
from ds4mlx.text.segments import DSML, Segment

__all__ = ["Dsml", "render_calls"]

_CONTROL = mark(DSML)
_SPELLINGS = (
    _CONTROL,
    DSML, "DSML｜",                              # the characters; the first bar lost
    f"｜{DSML}｜", f"｜{_CONTROL}｜",              # doubled bars, around characters or around the token
    "",                                          # plain XML
)


class Dsml:
    """The syntax as `syntax.base.ToolSyntax` asks for it."""

    mark = _CONTROL

    def __init__(self) -> None:
        self._mark_of = {f"<{spelling}tool_calls>": spelling for spelling in _SPELLINGS}
        self.starts = tuple(self._mark_of)
        self.canonical_start = self.starts[0]

    def open_block(self, start: str, declared: Collection[str] | None) -> DsmlBlock:
        return DsmlBlock(self._mark_of[start], declared)

    def render_calls(self, calls: Sequence[ToolCall]) -> list[Segment]:
        return render_calls(calls)
