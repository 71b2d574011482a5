"""A DSML tool block read from pieces: tags and parameter bodies in, tool events out.

    tool_calls > invoke name= > parameter name= string= > body, or again parameters

Values are streamed as JSON fragments. Time is linear in the text, and nothing recurses: what is open lies on a stack.
"""
import logging
from collections.abc import Callable, Collection

from ds4mlx.chat.events import ParserEvent, ToolArgsDelta, ToolCallEnd, ToolCallStart
from ds4mlx.chat.syntax.base import BLANKS, BlockState, Region, partial_tail
from ds4mlx.chat.syntax.dsml_tags import Tag, TagReader
from ds4mlx.chat.syntax.dsml_values import JsonValue, StringValue, Value, string_piece

MAX_NESTING = 64             # parameters within parameters
MAX_STRUCTURE_TOKENS = 512   # in a row without a tag coming to its end

log = logging.getLogger(__name__)


class DsmlBlock:
    """One block whose tags carry `mark`, from right after its start. See `syntax.base.ToolBlock`."""

    def __init__(self, mark: str, declared: Collection[str] | None) -> None:
        self._declared = declared
        self._block_heads = (f"<{mark}invoke", f"</{mark}tool_calls")
        self._invoke_heads = (f"<{mark}parameter", f"</{mark}invoke")
        self._parameter_heads = (f"<{mark}parameter", f"</{mark}parameter")
        self._closing_tag = f"</{mark}parameter>"
        self._read: Callable[[str, int], int] = self._read_tag
        self._tags = TagReader()
        self._tail = ""                   # of a body: what may be the closing tag, or a nested parameter
        self._blanks: list[str] = []      # that start a body of yet unknown kind
        self._value: Value = StringValue()
        self._objects: list[set[str]] = []  # keys of the open JSON objects: arguments, then nested parameters
        self._muted = 0                   # depth in self._objects of a repeated parameter, whose value is dropped
        self._fragments: list[str] = []
        self._events: list[ParserEvent] = []
        self._calls = 0                   # headers read
        self._structure_tokens = -1       # since the one that ended a tag, which counts as none
        self.state = BlockState.OPEN
        self.complete_calls = 0

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._calls > self.complete_calls else None

    @property
    def unfinished(self) -> str:
        return self._tags.text + self._tail

    @property
    def region(self) -> Region:
        if self.state is not BlockState.OPEN:
            return Region.OUTSIDE
        if self._read == self._read_tag or len(self._tail) >= 2:
            return Region.STRUCTURE
        return Region.STRING_BODY if self._read == self._read_start_of_body else self._value.region

    def feed(self, text: str) -> int:
        position = 0
        while position < len(text) and self.state is BlockState.OPEN:
            position = self._read(text, position)
        return position

    def end_token(self) -> None:
        self._structure_tokens = self._structure_tokens + 1 if self.region is Region.STRUCTURE else 0
        if self._structure_tokens > MAX_STRUCTURE_TOKENS:
            self.state = BlockState.MALFORMED

    def take_events(self) -> list[ParserEvent]:
        self._flush_fragments()
        events, self._events = self._events, []
        return events

    # Reading: each method takes text from a position on and returns the position it reached.

    def _read_tag(self, text: str, position: int) -> int:
        if not self._objects:
            heads = self._block_heads
        else:
            heads = self._invoke_heads if len(self._objects) == 1 else self._parameter_heads
        reader = self._tags
        position = reader.feed(text, position, heads)
        if reader.tag is not None:
            self._structure_tokens = -1
            accepted = self._apply(reader.tag)
            self._tags = TagReader() if accepted else reader
        if reader.failed or self._tags.tag is not None:
            self.state = BlockState.MALFORMED
        return position

    def _read_body(self, text: str, position: int) -> int:
        """Passes a body on up to its closing tag, of which any part is held back."""
        data = self._tail + text[position:]
        end = data.find(self._closing_tag)
        if end < 0:
            keep = partial_tail(data, self._closing_tag)
            self._tail = data[len(data) - keep:]
            self._emit(self._value.feed(data[:len(data) - keep]))
            return len(text)
        position += end + len(self._closing_tag) - len(self._tail)
        self._emit(self._value.feed(data[:end]) + self._value.end())
        self._end_parameter()
        return position

    def _read_start_of_body(self, text: str, position: int) -> int:
        """Without a `string` attribute, a body that begins with a parameter is an object, any other a string."""
        data = self._tail + text[position:]
        body = data if self._tail else data.lstrip(BLANKS)
        self._blanks.append(data[:len(data) - len(body)])
        nested = self._invoke_heads[0]
        if nested.startswith(body):
            self._tail = body
            return len(text)
        if body.startswith(nested) and body[len(nested)] in BLANKS:
            position += len(data) - len(body) + len(nested) - len(self._tail)
            self._blanks, self._tail = [], ""
            self._open_object()
            self._tags = TagReader(nested)
            self._read = self._read_tag
            return position
        self._tail = "".join(self._blanks) + self._tail  # the reader of bodies starts over with all that was held
        self._blanks, self._read = [], self._read_body
        return position + len(data) - len(body)

    # What a tag does. False: it may not stand here.

    def _apply(self, tag: Tag) -> bool:
        name = tag.attributes.get("name", "")
        if tag.head == self._block_heads[1]:
            self.state = BlockState.COMPLETE
            return self.complete_calls > 0
        if tag.head == self._invoke_heads[1]:
            self._close_call()
        elif tag.head == self._parameter_heads[1]:
            self._close_object()
            self._end_parameter()
        elif tag.head == self._block_heads[0]:
            return self._open_call(name)
        else:
            return self._open_parameter(name, tag.attributes.get("string"))
        return True

    def _open_call(self, name: str) -> bool:
        if not name or (self._declared is not None and name not in self._declared):
            return False
        self._events.append(ToolCallStart(self._calls, name))
        self._calls += 1
        self._open_object()
        return True

    def _close_call(self) -> None:
        self._close_object()
        self._flush_fragments()
        self._events.append(ToolCallEnd(self.complete_calls))
        self.complete_calls += 1

    def _open_parameter(self, name: str, string: str | None) -> bool:
        keys = self._objects[-1]
        if not name or len(self._objects) > MAX_NESTING:
            return False
        if name in keys and not self._muted:
            log.info("the model repeated a parameter: the first one counts")  # its name is the model's words
            self._muted = len(self._objects)
        self._emit(("," if keys else "") + f'"{string_piece(name)}":')
        keys.add(name)
        json_value = string is not None and string.strip().lower() == "false"
        self._value = JsonValue() if json_value else StringValue()
        self._read = self._read_start_of_body if string is None else self._read_body
        return True

    def _end_parameter(self) -> None:
        if self._muted == len(self._objects):
            self._muted = 0
        self._tail, self._read, self._structure_tokens = "", self._read_tag, -1

    def _open_object(self) -> None:
        self._emit("{")
        self._objects.append(set())

    def _close_object(self) -> None:
        self._objects.pop()
        self._emit("}")

    def _emit(self, fragment: str) -> None:
        if fragment and not self._muted:
            self._fragments.append(fragment)

    def _flush_fragments(self) -> None:
        if self._fragments:
            self._events.append(ToolArgsDelta(self._calls - 1, "".join(self._fragments)))
            self._fragments = []
