"""One answer as it is sampled: token bytes and control tokens in, reasoning, text and tool events out.

    reasoning --</think>--> text --block start--> tool block --its end--> done

A block that the model was not trained to write (another spelling, or one inside open reasoning) is read tentatively:
nothing of it is shown until it is whole, and it turns out to be calls or to be text.
"""
import codecs
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from ds4mlx.chat.events import (FinishReason, ParserEvent, ReasoningDelta, ReasoningEnd, Recovered, TextDelta,
                                ToolBlockEnd, ToolBlockStart, ToolCallStart, gather)
from ds4mlx.chat.stop_strings import StopStrings
from ds4mlx.chat.syntax.base import BLANKS, BlockState, MarkerScan, Region, ToolBlock, ToolSyntax, mark, spelled
from ds4mlx.chat.syntax.dsml import Dsml
from ds4mlx.text.segments import EOS, THINK_CLOSE, THINK_OPEN, Control

log = logging.getLogger(__name__)

EndReason = Literal["stop", "length", "cancelled"]

_THINK_CLOSE_MARK = mark(THINK_CLOSE)
_CHUNK = 4096  # characters read at a time: block readers copy what is left of a chunk at every tag


class _OpenBlock:
    """A block being read, and what becomes of it if it is none."""

    def __init__(self, reader: ToolBlock, *, canonical: bool, tentative: bool, breaker: str,
                 raw: list[str]) -> None:
        self.reader = reader
        self.canonical = canonical
        self.tentative = tentative
        self.breaker = breaker                # a mark that cannot be in this block
        self.raw = raw                        # its text with the white space before it
        self.events: list[ParserEvent] = []   # of a tentative one, until it is known to be one


class AnswerStream:
    """Reads one answer. Push every sampled token until `done`, or call `finish`; no events follow after that.

    Which events come, deltas joined, does not depend on how the bytes are cut into tokens.
    """

    def __init__(self, *, thinking: bool, tools: Collection[str] | None, stop: Sequence[str] = (),
                 syntax: ToolSyntax | None = None, fits: Callable[[str, str], bool] | None = None) -> None:
        """thinking: the prompt ended inside reasoning; tools: declared names; without any no block is recognised.
        fits: whether the arguments (JSON) of a call by this name keep to its schema, asked of tentative blocks only."""
        self._syntax: ToolSyntax = syntax or Dsml()
        self._tools, self._fits = frozenset(tools or ()), fits
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop)
        self._in_reasoning = thinking
        self._scan = self._reasoning_scan() if thinking else self._text_scan()
        self._block: _OpenBlock | None = None
        self._events: list[ParserEvent] = []
        self._started = False
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.implicit_close = False            # a tool block ended reasoning that the model forgot to close
        self.exact_block = False               # the answer ended with a whole canonical block, fit to be replayed
        self.open_call: int | None = None      # at the end: a call whose header was shown but which never completed

    @property
    def done(self) -> bool:
        """The answer is over: there is nothing more to sample."""
        return self.finish_reason is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    @property
    def in_reasoning(self) -> bool:
        """The next token belongs to the reasoning."""
        return self._in_reasoning and not self.done

    @property
    def reasoning_closed(self) -> bool:
        return not self._in_reasoning

    @property
    def masks_eos(self) -> bool:
        """A block that can only be a call is open: sampling EOS would cut it."""
        return self._block is not None and not self._block.tentative and not self.done

    @property
    def region(self) -> Region:
        """Where the next token falls."""
        return Region.OUTSIDE if self._block is None or self.done else self._block.reader.region

    def push(self, piece: bytes | Control) -> list[ParserEvent]:
        """Reads one sampled token. `Control(EOS)` ends the answer."""
        if self.done or piece == Control(EOS):
            return self.finish("stop")
        if isinstance(piece, bytes):
            text = self._decoder.decode(piece)
        else:
            text = self._decoder.decode(b"", final=True) + mark(piece.literal)
            if piece.literal == THINK_OPEN and self._in_reasoning and not self._started:
                text = ""  # the prompt has opened the reasoning already
        self._started = True
        self._read(text)
        if self._block is not None and not self.done:
            self._block.reader.end_token()
            self._read(self._after_block(""))
        return self._take_events()

    def finish(self, reason: EndReason) -> list[ParserEvent]:
        """Ends the answer and releases everything held."""
        if self.done:
            return []
        self._read(self._decoder.decode(b"", final=True))
        if self._block is not None and not self.done:
            self._finish_block(self._block, reason)
        if not self.done:
            self._show(self._scan.flush())
            self._end(reason)
        return self._take_events()

    # Prose: reasoning and text.

    def _reasoning_scan(self) -> MarkerScan:
        starts = (self._syntax.canonical_start,) if self._tools else ()
        return MarkerScan((_THINK_CLOSE_MARK, THINK_CLOSE, *starts), hold_blanks=bool(self._tools))

    def _text_scan(self) -> MarkerScan:
        return MarkerScan(self._syntax.starts if self._tools else (), hold_blanks=bool(self._tools))

    def _read(self, text: str) -> None:
        """Reads text with marks, as far as the answer goes."""
        pending = [text[at:at + _CHUNK] for at in range(0, len(text), _CHUNK)]
        pending.reverse()
        while pending and not self.done:
            chunk = pending.pop()
            rest = self._read_prose(chunk) if self._block is None else self._read_block(self._block, chunk)
            if rest:
                pending.append(rest)

    def _read_prose(self, text: str) -> str:
        scanned = self._scan.feed(text)
        self._show(scanned.text)
        if scanned.marker in (THINK_CLOSE, _THINK_CLOSE_MARK):
            self._show(scanned.blanks)
            self._close_reasoning()
        elif scanned.marker and not self.done:
            self._open_block(scanned.marker, scanned.blanks)
        return scanned.rest

    def _show(self, text: str) -> None:
        text = spelled(text)
        if self._in_reasoning:
            self._emit([ReasoningDelta(text)] if text else [])
            return
        shown = self._stops.feed(text)
        self._emit([TextDelta(shown)] if shown else [])
        if self._stops.matched is not None:
            self._end("stop_string")

    def _close_reasoning(self) -> None:
        self._emit([ReasoningEnd(natural=True)])
        self._in_reasoning, self._scan = False, self._text_scan()

    # Tool blocks.

    def _open_block(self, start: str, blanks: str) -> None:
        canonical = start == self._syntax.canonical_start
        tentative = self._in_reasoning or not canonical
        if not tentative:
            self._flush_stops()
            if self.done:
                return
            self._emit([ToolBlockStart()])
        reader = self._syntax.open_block(start, self._tools if tentative else None)
        breaker = ""
        if self._in_reasoning:
            breaker = _THINK_CLOSE_MARK
        elif spelled(start) == start:  # a block spelled in characters has no control tokens, but one may follow it
            breaker = self._syntax.mark
        self._block = _OpenBlock(reader, canonical=canonical, tentative=tentative, breaker=breaker, raw=[blanks, start])

    def _read_block(self, block: _OpenBlock, text: str) -> str:
        if block.reader.state is BlockState.COMPLETE:  # inside reasoning: only the end of the answer makes it count
            rest = text.lstrip(BLANKS)
            block.raw.append(text[:len(text) - len(rest)])
            return self._give_up(block) + rest if rest else ""
        end = text.find(block.breaker) if block.breaker else -1
        readable = text if end < 0 else text[:end]
        used = block.reader.feed(readable)
        block.raw.append(readable[:used])
        if not block.tentative:
            self._emit(block.reader.take_events())
            self._forget_raw(block)
        if block.reader.state is BlockState.OPEN and end >= 0:
            return self._give_up(block) + text[end:]
        return self._after_block(text[used:])

    def _after_block(self, rest: str) -> str:
        """What is still to be read, once the open block's reader has stopped."""
        block = self._block
        assert block is not None
        if block.reader.state is BlockState.COMPLETE and not self._in_reasoning:
            if not self._counts(block):
                return self._give_up(block) + rest
            self._complete(block)
        elif block.reader.state is BlockState.MALFORMED and block.tentative:
            return self._give_up(block) + rest
        elif block.reader.state is BlockState.MALFORMED:
            self._break_off(block, "stop")
        return rest

    def _forget_raw(self, block: _OpenBlock) -> None:
        """Text is kept to be given back, which is over when a call has been shown."""
        if block.reader.complete_calls or block.reader.open_call is not None:
            block.raw.clear()

    def _give_up(self, block: _OpenBlock) -> str:
        """A tentative block is none. Shows it, and returns its end that has to be read again: a marker may be in it."""
        self._block = None
        text, tag = "".join(block.raw), block.reader.unfinished
        kept = text[:len(text) - len(tag)].rstrip(BLANKS)
        self._show(kept)
        return text[len(kept):]

    def _counts(self, block: _OpenBlock) -> bool:
        """Whether a whole block is one of calls: nothing held a tentative one to the schemas of strict tools."""
        if not block.tentative:
            return True
        block.events += block.reader.take_events()
        refused = [name for name, arguments in gather(block.events).calls
                   if self._fits is not None and not self._fits(name, arguments)]
        if refused:
            log.info("the arguments of %r do not keep to its strict schema; the block is shown as text", refused[0])
        return not refused

    def _complete(self, block: _OpenBlock) -> None:
        if block.tentative:
            self._flush_stops()
            if self.done:
                return
            self._emit([ToolBlockStart(), *block.events])
        self.exact_block = block.canonical
        self._emit([ToolBlockEnd()])
        self._end("tool_calls")

    def _finish_block(self, block: _OpenBlock, reason: EndReason) -> None:
        """The answer ends while a block is open, or complete inside reasoning."""
        if not block.tentative:
            self._break_off(block, reason)
        elif block.reader.state is BlockState.COMPLETE and reason != "cancelled" and self._counts(block):
            self.implicit_close = True
            self._close_reasoning()
            self._complete(block)
        else:
            self._show("".join(block.raw))

    def _break_off(self, block: _OpenBlock, reason: EndReason) -> None:
        """A streamed block ends early: its complete calls stand, mere text goes back, half a call alone is an error."""
        self.open_call = block.reader.open_call
        if block.reader.complete_calls:
            self._emit([ToolBlockEnd()])
            self._end("tool_calls" if reason == "stop" else reason)
        elif self.open_call is None:
            self._emit([Recovered(spelled("".join(block.raw)))])
            self._end(reason)
        elif reason == "stop":
            self.error_code = "incomplete_tool_call"
            self.error = "the model broke off inside a tool call; send the request again"
            self._end("error")
        else:
            self._end(reason)

    # Events.

    def _flush_stops(self) -> None:
        shown = self._stops.flush()
        self._emit([TextDelta(shown)] if shown else [])
        if self._stops.matched is not None:
            self._end("stop_string")

    def _end(self, reason: FinishReason) -> None:
        self._block = None
        if self._in_reasoning:
            self._emit([ReasoningEnd(natural=False)])
        elif self._stops.matched is None:
            shown = self._stops.flush()
            self._emit([TextDelta(shown)] if shown else [])
        self.finish_reason = reason if self._stops.matched is None else "stop_string"

    def _emit(self, events: Iterable[ParserEvent]) -> None:
        """Appends events; a delta joins the one before it."""
        for event in events:
            last = self._events[-1] if self._events else None
            match last, event:
                case ReasoningDelta(), ReasoningDelta():
                    self._events[-1] = ReasoningDelta(last.text + event.text)
                case TextDelta(), TextDelta():
                    self._events[-1] = TextDelta(last.text + event.text)
                case _, ToolCallStart() if event.name not in self._tools:
                    log.info("the model calls a tool that the request does not declare")  # a name is the model's words
                    self._events.append(event)
                case _:
                    self._events.append(event)

    def _take_events(self) -> list[ParserEvent]:
        events, self._events = self._events, []
        return events
