"""A conversation with a model on this machine, whose every token can be seen, gone back to and branched from."""
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from ds4mlx.api import saved
from ds4mlx.api.answer import Answer
from ds4mlx.api.rendering import Messages, Style, answer_message, listed
from ds4mlx.chat.events import Event, Finish, ToolCallStart, Usage
from ds4mlx.chat.messages import Effort, Json
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.engine.protocol import Row, Sampling, Step
from ds4mlx.engine.taps import Taps, Watcher
from ds4mlx.errors import BadRequest, UsageError
from ds4mlx.models.deepseek_v4.directions import Steering
from ds4mlx.service.turn import GREEDY_REGIONS, MAX_MASKED_EOS
from ds4mlx.sessions.identity import Identity
from ds4mlx.text.segments import Control

if TYPE_CHECKING:
    from ds4mlx.api.model import Model


class Session:
    """One conversation. It belongs to the thread that loaded the model.

    `tokens` are all that were read and sampled. The last sampled one is fed with whatever comes next.
    """

    def __init__(self, model: "Model", context: int, steering: Steering | None = None) -> None:
        self.messages: list[dict[str, Json]] = []
        self.style = Style()
        self._model, self.context, self.steering = model, context, steering
        self._state = model.engine.open(context)
        self._unfed: list[int] = []
        self._answer: Answer | None = None
        self._told = False      # the answer is of a conversation, and not among the messages yet

    @property
    def tokens(self) -> list[int]:
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
             thinking: bool | None = None, effort: Effort | None = None, max_tokens: int | None = None,
             sampling: Sampling = Sampling(), stop: Sequence[str] = ()) -> Answer:
        """The answer to a question, or to messages in OpenAI's form, behind those that were told before.

        The prompt is read before this returns; what of it the session has already is not read again. tools, thinking
        and effort hold until others are given. Raises BadRequest for messages that cannot be rendered, and a prompt
        without room for an answer; the session is then as it was.
        """
        self._settle()
        style = Style(self.style.tools if tools is None else tuple(tools),
                      self.style.thinking if thinking is None else thinking, effort or self.style.effort)
        messages = [*self.messages, *listed(said)]
        renderer = self._model.renderer(self.context)
        conversation = renderer.conversation(messages, style)
        prompt = renderer.prompt(conversation)
        reused = self._read(self._model.tokenizer.encode(prompt.segments), room=1)
        self.messages, self.style, self._told = messages, style, True
        names = () if conversation.tools_banned else tuple(tool.name for tool in conversation.tools)
        return self._begin(AnswerStream(thinking=prompt.thinking, tools=names, stop=tuple(stop)), reused, max_tokens,
                           sampling)

    def complete(self, text: str = "", *, max_tokens: int | None = None, sampling: Sampling = Sampling(),
                 stop: Sequence[str] = ()) -> Answer:
        """What follows the session's tokens and then `text`, in which nothing is special. Raises BadRequest."""
        self._settle()
        before, tokenizer = self.tokens, self._model.tokenizer
        ids = [*(before or [tokenizer.bos]), *tokenizer.encode_literal(text)]
        reused = self._read(ids, room=1)
        self._told = False
        return self._begin(AnswerStream(thinking=False, tools=None, stop=tuple(stop)), reused, max_tokens, sampling)

    def read(self, tokens: Sequence[int]) -> None:
        """Take tokens in behind those that are there. Raises BadRequest where they do not fit."""
        self._settle()
        self._read([*self.tokens, *tokens])

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
        told = self._model.renderer(self.context).told_by(self.text, self.messages, self.style)
        self.messages = self.messages[:told]

    def fork(self) -> Self:
        """Another session in the same place. Rows are shared, nothing is computed, and neither hears of the other."""
        self._settle()
        other = type(self)(self._model, self.context, self.steering)
        other._state.branch(self._state, len(self._state.tokens))
        other._unfed, other.messages, other.style = [*self._unfed], [*self.messages], self.style
        return other

    def taps(self, start: int = 0, stop: int | None = None, layers: Sequence[int] | None = None) -> Taps:
        """What the model computes at the tokens of a slice of `tokens`, of these layers or all.

        They are computed once more, beside the session, which neither changes nor slows down. A token of Flash takes
        4 MB of NumPy arrays with all layers. Raises ValueError for an empty slice, UsageError for an engine that
        cannot tell.
        """
        tokens = self.tokens
        start, stop, _ = slice(start, stop).indices(len(tokens))
        if start >= stop:
            raise ValueError(f"the slice {start}:{stop} of {len(tokens)} tokens is empty")
        engine = self._model.engine
        if not isinstance(engine, Watcher):
            raise UsageError(f"{self._model.info.backend} has no taps; load the model with engine mlx")
        self._model.steer(self.steering)
        beside = engine.open(stop)      # no larger than it has to be: a second context may not fit
        try:
            reached = beside.branch(self._state, start)
            for part in self._slices(tokens[reached:start]):
                engine.prefill(beside, part)
            chosen = range(self._model.layers) if layers is None else layers
            return Taps.joined([engine.watch(beside, part, chosen) for part in self._slices(tokens[start:stop])])
        finally:
            beside.close()

    def save(self, path: Path | str) -> None:
        """Write the state as a checkpoint, and the messages to `path`.json. Raises CheckpointError, OSError."""
        self._settle()
        self._feed([])
        saved.write(Path(path), self._state, self._model.engine, self._identity(),
                    self._model.tokenizer.key_bytes_of_ids(self.tokens))
        saved.write_messages(Path(f"{path}.json"), self.messages, self.style)

    def load(self, path: Path | str) -> None:
        """Become what was saved, by this or another process. Raises CheckpointError and stays as it was, OSError."""
        self._settle()
        messages, style, *_ = saved.read_messages(Path(f"{path}.json"))
        self._state.restore(saved.read(Path(path), self._identity(), self._model.engine, self.context))
        self.messages, self.style, self._unfed = messages, style, []

    def close(self) -> None:
        """Give the memory back."""
        self._answer = None
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> Identity:
        return saved.identity_of(self._model.info, self._model.tokenizer, self.steering)

    # ---- reading

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

    def _begin(self, stream: AnswerStream, reused: int, max_tokens: int | None, sampling: Sampling) -> Answer:
        room = self.context - len(self._state.tokens)
        most = room if max_tokens is None else min(max_tokens, room)
        answer = Answer(iter(()))
        answer._events = self._answered(answer, stream, most, sampling, len(self._state.tokens), reused)
        self._answer = answer
        return answer

    def _answered(self, answer: Answer, stream: AnswerStream, most: int, sampling: Sampling, prompt: int,
                  reused: int) -> Iterator[Event]:
        tokenizer, masked, reasoned = self._model.tokenizer, 0, 0
        while not stream.done and len(answer.steps) < most:
            hold = stream.masks_eos and masked < MAX_MASKED_EOS
            for step in self._step(answer, _stricter(sampling, stream, tokenizer.eos if hold else None)):
                masked += hold and step.top[0][0] == tokenizer.eos
                reasoned += stream.in_reasoning
                literal = tokenizer.literal(step.token)
                piece = tokenizer.token_bytes(step.token) if literal is None else Control(literal)
                yield from (_named(event, prompt) for event in stream.push(piece))
                if stream.done:
                    break
        if not stream.done:
            yield from stream.finish("length")
        sampled = sum(step.token != tokenizer.eos for step in answer.steps)
        self._tell(answer)
        yield Finish(stream.finish_reason, Usage(prompt, reused, sampled, reasoned), stream.stop_string, stream.error,
                     stream.error_code)

    def _step(self, answer: Answer, sampling: Sampling) -> list[Step]:
        token = self._unfed[-1] if self._unfed else None
        self._model.steer(self.steering)
        (steps,) = self._model.engine.decode([Row(self._state, sampling, token, answer.tokens)])
        answer.steps += steps
        answer.tokens += [step.token for step in steps]
        self._unfed = [steps[-1].token]
        return steps

    def _settle(self) -> None:
        """End the answer that is being read, if there is one."""
        if self._answer is not None:
            self._answer.stop()
            self._tell(self._answer)
            self._answer = None

    def _tell(self, answer: Answer) -> None:
        """Keep an answer, whole or not, among the messages."""
        if self._told and answer is self._answer:
            self._told = False
            self.messages.append(answer_message(answer.text, answer.reasoning, answer.calls, answer.call_ids))


def _stricter(sampling: Sampling, stream: AnswerStream, banned: int | None) -> Sampling:
    """Inside a tool block only the likeliest token will do, and the answer may not end."""
    if stream.region in GREEDY_REGIONS:
        sampling = replace(sampling, temperature=0.0)
    if banned is not None:
        sampling = replace(sampling, banned=sampling.banned | {banned}, top_logprobs=max(1, sampling.top_logprobs))
    return sampling


def _named(event: Event, prompt: int) -> Event:
    """Calls get ids that no other turn of the conversation has: it has grown since."""
    return replace(event, id=f"call_{prompt}_{event.index}") if isinstance(event, ToolCallStart) else event
