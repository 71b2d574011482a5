"""One question, one answer, straight from the engine: a budget of tokens, the last of which are not for reasoning.

With few tokens left, reasoning is ended where the model is nearly ready to, and with fewer still it is ended anyway, so
that there is an answer to grade.
"""
import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ds4mlx.chat.events import ParserEvent, gather
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.engine.protocol import Engine, Row, Sampling, Session
from ds4mlx.evaluation.grading import Said
from ds4mlx.text.segments import THINK_CLOSE, Control
from ds4mlx.text.tokenizer import Tokenizer

Phase = Literal["prefill", "thinking", "answering"]
End = Literal["stop", "length", "cancelled"]
Closed = Literal["", "model", "soft", "hard"]


@dataclass(frozen=True, slots=True)
class Budget:
    """In tokens. With `soft` left, reasoning ends if its end is among the `rank` likeliest tokens; with `hard`, in any
    case."""
    tokens: int = 16000
    soft: int = 1024
    hard: int = 512
    rank: int = 3


@dataclass(frozen=True, slots=True)
class Answered:
    """closed: what ended the reasoning: the model, also where there was none, or a limit; "" where nothing did."""
    said: Said
    tokens: int
    seconds: float
    end: End
    closed: Closed


@dataclass(frozen=True, slots=True)
class Progress:
    """`text` is what is new; done of total: tokens of the prompt, or of the budget."""
    phase: Phase
    text: str
    done: int
    total: int


Told = Callable[[Progress], bool]       # returns whether to go on


def ask(engine: Engine, session: Session, tokenizer: Tokenizer, prompt: Sequence[int], *, thinking: bool,
        tools: Sequence[str], sampling: Sampling, budget: Budget, chunk: int, told: Told) -> Answered:
    """The session is emptied first. What there is when `told` says no is the answer."""
    session.rewind(0)
    began = time.monotonic()
    for at in range(0, len(prompt), chunk):
        if not told(Progress("prefill", "", at, len(prompt))):
            return Answered(Said("", (), False), 0, time.monotonic() - began, "cancelled", "")
        engine.prefill(session, prompt[at:at + chunk])
    return _Answering(engine, session, tokenizer, thinking, tools, budget).run(sampling, told, began)


class _Answering:
    """The state of one answer."""

    def __init__(self, engine: Engine, session: Session, tokenizer: Tokenizer, thinking: bool, tools: Sequence[str],
                 budget: Budget) -> None:
        self.engine, self.session, self.tokenizer, self.budget = engine, session, tokenizer, budget
        self.closed: Closed = "" if thinking else "model"
        self.stream = AnswerStream(thinking=thinking, tools=tools or None)
        self.events: list[ParserEvent] = []
        self.generated: list[int] = []
        self.close = tokenizer.control[THINK_CLOSE]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")     # a token may be a part of a character

    def run(self, sampling: Sampling, told: Told, began: float) -> Answered:
        budget = self.budget
        end: End = "length"
        while len(self.generated) < budget.tokens and not self.stream.done:
            text = ""
            for token in self._step(sampling, budget.tokens - len(self.generated)):
                text += self._take(token)
                if self.stream.done or len(self.generated) == budget.tokens:
                    break
            phase: Phase = "thinking" if self.stream.in_reasoning else "answering"
            if not told(Progress(phase, text, len(self.generated), budget.tokens)):
                end = "cancelled"
                break
        end = "stop" if self.stream.done else end
        if not self.stream.done:
            self.events += self.stream.finish(end)
        ids = [token for token in self.generated if token != self.tokenizer.eos]
        said = Said(self.tokenizer.decode(ids), gather(self.events).calls, end == "stop")
        return Answered(said, len(self.generated), time.monotonic() - began, end, self.closed)

    def _step(self, sampling: Sampling, left: int) -> list[int]:
        """The next tokens, one unless drafts held."""
        mask = None
        soft = self.stream.in_reasoning and left <= self.budget.soft
        if self.stream.in_reasoning and left <= self.budget.hard:
            mask = np.zeros(self.engine.info.vocab, bool)
            mask[self.close] = True
        how = replace(sampling, top_logprobs=self.budget.rank) if soft and mask is None else sampling
        last = self.generated[-1] if self.generated else None
        steps, = self.engine.decode([Row(self.session, how, last, self.generated, mask)])
        tokens = [step.token for step in steps]
        if mask is not None:
            self.closed = "hard"
        elif soft and self.close not in tokens and self.close in [token for token, _ in steps[-1].top]:
            tokens[-1], self.closed = self.close, "soft"    # sampled, but in no state yet: it may still be another
        return tokens

    def _take(self, token: int) -> str:
        """Read one token; returns its text."""
        literal, spelling = self.tokenizer.literal(token), self.tokenizer.token_bytes(token)
        self.generated.append(token)
        self.events += self.stream.push(spelling if literal is None else Control(literal))
        if not self.closed and not self.stream.in_reasoning and token != self.tokenizer.eos:
            self.closed = "model"
        return self.decoder.decode(spelling) if token != self.tokenizer.eos else ""
