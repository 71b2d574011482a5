"""A conversation with a model on this machine, whose every token can be seen, gone back to and branched from."""
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ds4mlx.api import saved
from ds4mlx.api.answer import Answer
from ds4mlx.api.rendering import (Messages, Style, ToolChoice, answer_message, counted, listed, request,
                                   require_limits, strings)
from ds4mlx.chat.events import Event, Usage
from ds4mlx.chat.messages import Conversation, Effort, Json
from ds4mlx.engine.protocol import Row, Sampling, Step
from ds4mlx.engine.taps import Taps, Watcher
from ds4mlx.errors import BadRequest, UsageError
from ds4mlx.models.deepseek_v4.directions import Steering
from ds4mlx.service.turn import EncodedPrompt, Reading, Turn
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.lookup import Live, VisibleKey, Wanted, decide, still_bound
from ds4mlx.text.keys import GrowingKey, tokens_within_each

if TYPE_CHECKING:
    from ds4mlx.api.model import Model


MOST_KEYS = 16  # of turns whose reasoning the next prompt leaves out, and the state keeps


class Session:
    """One conversation. It belongs to the thread that loaded the model; a closed one raises ValueError.

    `tokens` are all that were read and sampled. The last sampled one is fed with whatever comes next.
    """

    def __init__(self, model: "Model", context: int, steering: Steering | None = None) -> None:
        self.messages: list[dict[str, Json]] = []
        self.style = Style()
        self._model, self.context, self.steering = model, context, steering
        self._state = model.engine.open(context)
        self._closed = False
        self._unfed: list[int] = []
        self._answer: Answer | None = None
        self._told = False      # the answer is of a conversation, and not among the messages yet
        self._ends: list[int] = []      # tokens up to the end of each message
        self._visible: tuple[VisibleKey, ...] = ()      # what the state may be called in a later prompt
        self._key = GrowingKey(model.tokenizer)

    @property
    def tokens(self) -> list[int]:
        """Ids of all that was read and sampled, from the first."""
        return [*self._state.tokens, *self._unfed]

    @property
    def text(self) -> str:
        """The tokens as text, control tokens by their names."""
        return self._model.tokenizer.decode(self.tokens)

    def logits(self) -> np.ndarray:
        """f32 [vocab] for the token after `tokens`. Raises ValueError for an empty session."""
        self._settle()
        self._feed([])
        return self._state.logits()

    def chat(self, said: str | Messages, *, tools: Sequence[dict[str, Json]] | None = None,
             tool_choice: ToolChoice | None = None, response_format: dict[str, Json] | None = None,
             thinking: bool | None = None, effort: Effort | None = None, max_tokens: int | None = None,
             sampling: Sampling | None = None, stop: str | Sequence[str] = ()) -> Answer:
        """The answer to a question, or to messages in OpenAI's form, behind those that were told before.

        The prompt is read before this returns; what of it the session has already is not read again: an earlier answer
        stays the tokens that were sampled. tools, thinking and effort hold until others are given; tool_choice and
        response_format are of this answer, and OpenAI's. Raises BadRequest for messages that cannot be rendered, and a
        prompt without room for an answer; the session is then as it was.
        """
        require_limits(max_tokens, sampling)
        self._settle()
        style = Style(self.style.tools if tools is None else tuple(tools),
                      self.style.thinking if thinking is None else thinking, effort or self.style.effort)
        messages = [*self.messages, *listed(said)]
        turn, conversation, prompt = self._model.encoded(request(messages, style, tool_choice, response_format),
                                                         self.context)
        prompt = self._model.held(conversation, prompt)
        kept, key_bytes, rest = self._onward(prompt)
        reused = self._read([*kept, *rest], room=1)
        old = self._ends[:len(self.messages)] if kept else []
        new = [origin.end - key_bytes for origin in prompt.origins[len(old):]]
        self._ends = old + [len(kept) + n for n in tokens_within_each(self._model.tokenizer, rest, new)]
        self.messages, self.style, self._told = messages, style, True
        turn = replace(turn, conversation=conversation, sampling=sampling or self._model.sampling, stop=strings(stop))
        return self._begin(turn, prompt, reused, max_tokens)

    def complete(self, text: str = "", *, max_tokens: int | None = None, sampling: Sampling | None = None,
                 stop: str | Sequence[str] = ()) -> Answer:
        """What follows the session's tokens and then `text`, in which nothing is special. Raises BadRequest."""
        require_limits(max_tokens, sampling)
        self._settle()
        before, tokenizer = self.tokens, self._model.tokenizer
        ids = [*(before or [tokenizer.bos]), *tokenizer.encode_literal(text)]
        reused = self._read(ids, room=1)
        self._told = False
        turn = Turn(Conversation((), thinking=False), sampling or self._model.sampling, stop=strings(stop),
                    api="completions")
        return self._begin(turn, EncodedPrompt(Wanted(ids, b"", turn.api), (), 0, thinking=False), reused, max_tokens)

    def read(self, tokens: Sequence[int]) -> None:
        """Take tokens in behind those that are there. Raises BadRequest where they do not fit."""
        self._settle()
        self._read([*self.tokens, *map(index, tokens)])

    def rewind(self, length: int) -> None:
        """Be as after the first `length` tokens; a negative number counts from the end, as in a slice.

        Goes back to the last place that was kept and reads from there, so any length is reached. Messages that are not
        there whole are forgotten. Raises ValueError for a length that is not there.
        """
        self._settle()
        tokens = self.tokens
        if not -len(tokens) <= length <= len(tokens):
            raise ValueError(f"the session has {len(tokens)} tokens, so it cannot go back to {length}")
        self._read(tokens[:length])
        told = bisect_right(self._ends, len(self.tokens))
        self.messages, self._ends = self.messages[:told], self._ends[:told]

    def fork(self) -> Self:
        """Another session in the same place. Rows are shared, nothing is computed, and neither hears of the other."""
        self._settle()
        other = type(self)(self._model, self.context, self.steering)
        other._state.branch(self._state, len(self._state.tokens))
        other._unfed, other.messages, other.style = [*self._unfed], [*self.messages], self.style
        other._ends, other._visible = [*self._ends], self._visible
        return other

    def taps(self, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None) -> Taps:
        """What the model computes at the tokens of a slice of `tokens`, of these layers or all.

        They are computed once more, beside the session, which neither changes nor slows down. A token of Flash takes
        4 MB of NumPy arrays with all layers. Raises ValueError for an empty slice or a layer that is not there,
        UsageError for an engine that cannot tell.
        """
        tokens = self.tokens
        start, stop, _ = slice(start, stop).indices(len(tokens))
        if start >= stop:
            raise ValueError(f"the slice {start}:{stop} of {len(tokens)} tokens is empty")
        engine = self._model.engine
        if not isinstance(engine, Watcher):
            raise UsageError(f"{self._model.info.backend} has no taps; load the model with engine mlx")
        every = range(self._model.layers)
        chosen = every if layers is None else layers
        if not set(chosen) <= set(every):
            raise ValueError(f"layers {list(chosen)} are not all there, the model has 0 to {every[-1]}")
        self._model.steer(self.steering)
        beside = engine.open(stop)      # no larger than it has to be: a second context may not fit
        try:
            reached = beside.branch(self._state, start)
            for part in self._slices(tokens[reached:start]):
                engine.prefill(beside, part)
            return Taps.joined([engine.watch(beside, part, chosen) for part in self._slices(tokens[start:stop])])
        finally:
            beside.close()

    def save(self, path: Path | str) -> None:
        """Write the state as a checkpoint, and the messages to `path`.json. Raises CheckpointError, OSError."""
        self._settle()
        self._feed([])
        path = Path(path).expanduser()
        saved.write(path, self._state, self._model.engine, self._identity(),
                    self._model.tokenizer.key_bytes_of_ids(self.tokens))
        saved.write_messages(Path(f"{path}.json"), saved.Said(self.messages, self.style, self._ends, self._visible))

    def load(self, path: Path | str) -> None:
        """Become what was saved, by this or another process. Raises CheckpointError and stays as it was, OSError."""
        self._settle()
        path = Path(path).expanduser()
        said = saved.read_messages(Path(f"{path}.json"))
        self._state.restore(saved.read(path, self._identity(), self._model.engine, self.context))
        self.messages, self.style, self._unfed = said.messages, said.style, []
        self._ends, self._visible = said.ends, said.visible

    def close(self) -> None:
        """Give the memory back."""
        self._closed, self._answer, self._unfed = True, None, []
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<Session, closed>"
        told = counted(len(self.messages), "message")
        return f"<Session of {counted(len(self.tokens), 'token')} of {self.context}, {told}>"

    def _identity(self) -> Identity:
        return saved.identity_of(self._model.info, self._model.tokenizer, self.steering)

    # ---- reading

    def _onward(self, prompt: EncodedPrompt) -> tuple[list[int], int, Sequence[int]]:
        """Tokens that stay as they are, the bytes of the prompt's key that they stand for, and the ids behind them."""
        tokens, key, wanted = self.tokens, self._key.of(self.tokens), prompt.wanted
        plan = decide(wanted, Live(tokens, key, self._visible)).best
        if plan is not None and plan.whole:
            at = len(key) if plan.then == "ids" else plan.key_bytes
            rest = (wanted.ids[len(tokens):] if plan.then == "ids" else
                    prompt.after_key(self._model.tokenizer, plan.key_bytes))
            if len(tokens) + len(rest) < self.context:
                return tokens, at, rest
        return [], 0, prompt.wanted.ids

    def _read(self, ids: list[int], room: int = 0) -> int:
        """Become the state after `ids`; returns how many of them were there. Raises BadRequest without `room` more."""
        if len(ids) + room > self.context:
            raise BadRequest(f"{len(ids)} tokens and {room} to answer with, the session takes {self.context}; open one "
                             "with a larger context")
        shared = next((i for i, (old, new) in enumerate(zip(self.tokens, ids)) if old != new),
                      min(len(self.tokens), len(ids)))
        reached = self._state.rewind(shared)
        self._unfed = []
        self._feed(ids[reached:])
        if ids:
            self._state.mark()
        return reached

    def _feed(self, ids: list[int]) -> None:
        self._model.steer(self.steering)
        for part in self._slices([*self._unfed, *ids]):
            self._model.engine.prefill(self._state, part)
            self._unfed = []    # not before: on a failure the last sampled token is still there

    def _slices(self, ids: Sequence[int]) -> list[Sequence[int]]:
        size = self._model.settings.prefill_chunk
        return [ids[start:start + size] for start in range(0, len(ids), size)]

    # ---- answering

    def _begin(self, turn: Turn, prompt: EncodedPrompt, reused: int, max_tokens: int | None) -> Answer:
        room = self.context - len(self._state.tokens)
        reading = Reading(turn, prompt, self._model.tokenizer, self._model.calls)
        answer = Answer(iter(()))
        answer._events = self._answered(answer, reading, room if max_tokens is None else min(max_tokens, room), reused)
        self._answer = answer
        return answer

    def _answered(self, answer: Answer, reading: Reading, most: int, reused: int) -> Iterator[Event]:
        prompt = len(self._state.tokens)
        while not reading.done and len(answer.steps) < most:
            for step in self._step(answer, reading):
                yield from reading.accept(step)
                if reading.done:
                    break
        yield from reading.close()
        self._close_with(reading)
        self._tell(answer)
        yield reading.end(Usage(prompt, reused, reading.completion_tokens, reading.reasoning_tokens))

    def _close_with(self, reading: Reading) -> None:
        """Leave the state as the next prompt has it, and know it by what that calls it."""
        ending = reading.ending()
        if ending.closing and self.tokens[-1] != ending.closing[-1] and len(self.tokens) < self.context:
            self._unfed += ending.closing
        self._visible = (*still_bound(self._visible, len(self.tokens)), *ending.visible(len(self.tokens)))[-MOST_KEYS:]

    def _step(self, answer: Answer, reading: Reading) -> list[Step]:
        token = self._unfed[-1] if self._unfed else None
        self._model.steer(self.steering)
        row = Row(self._state, reading.sampling(), token, answer.tokens, reading.mask(self._model.info.vocab))
        (steps,) = self._model.engine.decode([row])
        answer.steps += steps
        answer.tokens += [step.token for step in steps]
        self._unfed = [steps[-1].token]
        return steps

    def _settle(self) -> None:
        """End the answer that is being read, if there is one. Raises ValueError where the session is closed."""
        self._model.require_usable()
        if self._closed:
            raise ValueError("the session is closed; open another one")
        if self._answer is not None:
            self._answer.stop()
            self._tell(self._answer)
            self._answer = None

    def _tell(self, answer: Answer) -> None:
        """Keep an answer, whole or not, among the messages."""
        if self._told and answer is self._answer:
            self._told = False
            self.messages.append(answer_message(answer.text, answer.reasoning, answer.calls, answer.call_ids))
            self._ends.append(len(self.tokens))
