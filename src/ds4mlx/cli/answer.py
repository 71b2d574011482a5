"""One answer on a terminal, in a pipe or as JSON. Text goes out as it is: never wrapped, never interpreted."""
import json
import time
from dataclasses import dataclass, field
from typing import TextIO

from ds4mlx.chat.events import (Event, Finish, Progress, ReasoningDelta, ReasoningEnd, Recovered, TextDelta,
                                ToolArgsDelta, ToolCallStart)
from ds4mlx.text.escaping import harmless

DIM, CYAN, PLAIN = "\x1b[2m", "\x1b[36m", "\x1b[0m"


@dataclass(slots=True)
class Calls:
    """The tool calls of an answer, as they come."""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def take(self, event: Event) -> None:
        match event:
            case ToolCallStart(_, name):
                self.names.append(name)
                self.arguments.append("")
            case ToolArgsDelta(index, fragment):
                self.arguments[index] += fragment

    def objects(self) -> list[dict[str, str]]:
        """In OpenAI's form: the arguments are JSON text."""
        return [{"name": name, "arguments": arguments} for name, arguments in zip(self.names, self.arguments)]


class Speed:
    """Seconds of one answer, from the moments its events arrive."""

    def __init__(self) -> None:
        self.asked = self.began = self.prefilled = self.ended = time.monotonic()
        self.first: float | None = None
        self.reused = -1

    def take(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Progress):
            if self.reused < 0:
                self.began, self.reused = now, event.done
            self.prefilled = now
        elif self.first is None:
            self.first = now
        self.ended = now

    @property
    def first_token_s(self) -> float:
        """From the question to the first sign of an answer, waiting included."""
        return (self.first or self.ended) - self.asked

    def numbers(self, end: Finish) -> dict[str, float]:
        prefill_s, decode_s = self.prefilled - self.began, self.ended - self.prefilled
        computed = end.usage.prompt_tokens - max(0, self.reused)
        return {"prefill_s": round(prefill_s, 4), "decode_s": round(decode_s, 4),
                "prefill_tps": _rate(computed, prefill_s), "decode_tps": _rate(end.usage.completion_tokens, decode_s)}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 2) if seconds > 0 else 0.0


class TextWriter:
    """Text as it comes; tool calls at the end, each a line of JSON."""

    def __init__(self, out: TextIO, *, reasoning: bool, color: bool) -> None:
        self.out, self.reasoning, self.color = out, reasoning, color
        self.shown = harmless if out.isatty() else str   # a file gets the bytes that the model said
        self.calls = Calls()
        self.last = "\n"      # what was written last: whether a line is open

    def write(self, event: Event) -> None:
        self.calls.take(event)
        match event:
            case ReasoningDelta(text) if self.reasoning:
                self._put(text, DIM)
            case ReasoningEnd() if self.reasoning:
                self._put("" if self.last.endswith("\n") else "\n\n")
            case TextDelta(text) | Recovered(text):
                self._put(text)

    def end(self, end: Finish, timings: dict[str, float]) -> None:
        if not self.last.endswith("\n"):
            self._put("\n")
        for call in self.calls.objects():
            self._put(json.dumps(call, ensure_ascii=False) + "\n", CYAN)

    def _put(self, text: str, style: str = "") -> None:
        if not text:
            return
        self.last = text
        text = self.shown(text)
        self.out.write(f"{style}{text}{PLAIN}" if style and self.color else text)
        self.out.flush()


class JsonWriter:
    """One object, when the answer is complete."""

    def __init__(self, out: TextIO, model: str) -> None:
        self.out, self.model = out, model
        self.calls = Calls()
        self.reasoning = self.content = ""

    def write(self, event: Event) -> None:
        self.calls.take(event)
        match event:
            case ReasoningDelta(text):
                self.reasoning += text
            case TextDelta(text) | Recovered(text):
                self.content += text

    def end(self, end: Finish, timings: dict[str, float]) -> None:
        usage = end.usage
        whole = {"model": self.model, "reasoning": self.reasoning, "content": self.content,
                 "tool_calls": self.calls.objects(), "finish_reason": end.reason, "stop_string": end.stop_string,
                 "usage": {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
                           "completion_tokens": usage.completion_tokens, "reasoning_tokens": usage.reasoning_tokens},
                 "timings": timings}
        self.out.write(json.dumps(whole, ensure_ascii=False) + "\n")
        self.out.flush()


Writer = TextWriter | JsonWriter


def speed_line(end: Finish, timings: dict[str, float]) -> str:
    cached = f", cached {end.usage.cached_tokens}" if end.usage.cached_tokens else ""
    return f"prefill: {timings['prefill_tps']:.2f} t/s, generation: {timings['decode_tps']:.2f} t/s{cached}"
