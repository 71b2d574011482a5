"""What a trace tells of a request: what was asked, what of it was there already and why no more, what came of it.

Records are written as they happen, as JSON lines or as text for people. A trace holds conversations in full, and it is
the only place that does: logs have numbers.
"""
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from ds4mlx.chat.events import Event, Finish, Recovered, ToolBlockEnd, ToolBlockStart, gather
from ds4mlx.service.metrics import Timings
from ds4mlx.service.slot import Start
from ds4mlx.service.trace_file import TraceFile
from ds4mlx.service.trace_records import Asked, Call, Finished, Happened, Record, Sampled, decided
from ds4mlx.service.trace_text import TextAccount
from ds4mlx.sessions.replay import Replays
from ds4mlx.text.tokenizer import Tokenizer

Format = Literal["text", "jsonl"]
Writing = Callable[[Record], bytes]     # of one request's records, in their order


class Trace:
    """An open trace. Raises UsageError when its file cannot be opened."""

    def __init__(self, path: Path, format: Format = "text", max_bytes: int = 0) -> None:
        self.path, self._format = path, format
        self._file = TraceFile(path, max_bytes, whole=format == "text")

    def request(self, tokenizer: Tokenizer, replays: Replays, asked: Callable[[], Asked]) -> "RequestTrace":
        """The account of a new request. `asked` is called on the engine thread."""
        return RequestTrace(self._file, self._format, tokenizer, replays, asked)

    def happened(self, event: str) -> None:
        """What belongs to no request; in JSON lines, to request 0."""
        written = TextAccount(0)(Happened(event)) if self._format == "text" else _as_json(0, Happened(event))
        self._file.write(0, written, ends=True)

    def close(self) -> None:
        self._file.close()


class RequestTrace:
    """The account of one request. Nothing is in the file before `starts`, or `finishes` of one that never ran."""

    def __init__(self, file: TraceFile, format: Format, tokenizer: Tokenizer, replays: Replays,
                 asked: Callable[[], Asked]) -> None:
        self._file, self._tokenizer, self._replays = file, tokenizer, replays
        self._number = file.number()
        self._asked: Callable[[], Asked] | None = asked
        self._early: list[str] = []     # events before it was decided what the request goes on from
        self._written: Writing = TextAccount(self._number) if format == "text" else partial(_as_json, self._number)

    def starts(self, start: Start) -> None:
        """Once more when the request begins again."""
        self._open()
        self._put(decided(start, self._replays, self._tokenizer))
        self._tell_early()

    def sampled(self, token: int, piece: bytes, events: Iterable[Event]) -> None:
        """A token, and what the parser made of it."""
        self._put(Sampled(token, piece))
        for event in events:
            if isinstance(event, ToolBlockStart):
                self.happened("tool block entered")
            elif isinstance(event, ToolBlockEnd):
                self.happened("tool block closed")
            elif isinstance(event, Recovered):
                self.happened("recovered: a tool block that cannot be read is given back as text")

    def happened(self, event: str) -> None:
        if self._asked is not None:
            self._early.append(event)
        else:
            self._put(Happened(event))

    def finishes(self, end: Finish, said: Iterable[Event], timings: Timings) -> None:
        self._open()
        self._tell_early()
        answer, usage = gather(said), end.usage
        computed = usage.prompt_tokens - usage.cached_tokens
        if end.reason == "cancelled":
            self.happened("cancelled")
        self._put(Finished(
            end.error_code or end.reason, end.error or "", usage.completion_tokens, usage.reasoning_tokens,
            round(timings.prefill_tps(computed), 2), round(timings.decode_tps(usage.completion_tokens), 2),
            round(timings.total_s, 3), answer.reasoning, answer.content,
            tuple(Call(id, *call) for id, call in zip(answer.call_ids, answer.calls))), ends=True)

    def _open(self) -> None:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._put(asked())

    def _tell_early(self) -> None:
        events, self._early = self._early, []
        for event in events:
            self._put(Happened(event))

    def _put(self, record: Record, ends: bool = False) -> None:
        self._file.write(self._number, self._written(record), ends=ends)


def _as_json(number: int, record: Record) -> bytes:
    fields = {"type": record.type, "request": number} | asdict(record)
    # A lone surrogate becomes \udc80, which is how JSON spells it.
    return (json.dumps(fields, ensure_ascii=False, default=_text) + "\n").encode("utf-8", "backslashreplace")


def _text(raw: object) -> str:
    assert isinstance(raw, bytes)
    return raw.decode("utf-8", "backslashreplace")
