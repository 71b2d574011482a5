"""One turn: what is asked, and its answer as it is sampled.

The parser is asked before each token, because what it has read decides how the next one may be sampled: tags of a tool
block greedily, and no end of the answer inside one.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds4mlx.chat.dialects.prompt import Replay
from ds4mlx.chat.events import Event, Finish, ToolCallEnd, ToolCallStart, Usage, gather
from ds4mlx.chat.messages import Conversation, Message, Reasoning, TextPart, ToolCall
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.chat.syntax.base import Region
from ds4mlx.engine.protocol import Sampling, Step
from ds4mlx.service.constraint import Constraint
from ds4mlx.service.slot import Ending
from ds4mlx.sessions.explain import Origin
from ds4mlx.sessions.lookup import VISIBLE, Api, VisibleKey, Wanted
from ds4mlx.sessions.replay import Replays, ToolMemory, cut_block, new_call_id
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.keys import after_key
from ds4mlx.text.segments import DSML, EOS, THINK_CLOSE, Control, Segment
from ds4mlx.text.tokenizer import Tokenizer

GREEDY_REGIONS = (Region.STRUCTURE, Region.JSON_STRUCTURE)
MAX_MASKED_EOS = 24  # a model that wants to end inside a tool block so many times will not close it
REPLACEMENT = "\ufffd".encode()  # for an id of a padded vocabulary that spells nothing


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came, for a trace."""
    model: str
    stream: bool
    body: bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """What a server asks for. `param` is the body's field that holds the prompt, for errors about it."""
    conversation: Conversation
    sampling: Sampling
    max_tokens: int | None = None  # None: the server's limit
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    one_call: bool = False         # the answer ends after its first tool call
    most_reasoning: int | None = None   # tokens of reasoning after which it is closed; None: any number
    api: Api = "chat"
    param: str = "messages"
    request_id: str = ""
    received: Received | None = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A rendered conversation in ids, of which the last `header_tokens` open the answer, and what finds its states.

    thinking: the answer begins with reasoning. key_of_answer: the key of the conversation with an answer to it, as a
    client would send it back; None where no conversation was rendered.
    """
    wanted: Wanted
    segments: tuple[Segment, ...]
    header_tokens: int
    thinking: bool
    origins: tuple[Origin, ...] = ()
    key_of_answer: Callable[[Message, Replay | None, bool], bytes] | None = None
    replays: Replays = Replays()
    constraint: Constraint | None = None

    def after_key(self, tokenizer: Tokenizer, key_bytes: int) -> list[int]:
        """Ids of what follows the first `key_bytes` bytes of the prompt's key."""
        return tokenizer.encode(after_key(tokenizer, self.segments, key_bytes))


class Reading:
    """One answer, token by token: sampling() and mask() for the next one, accept() of what was sampled.

    Nothing here waits or is told to anybody: `service.answer` and `api.session` do so.
    """

    def __init__(self, turn: Turn, prompt: EncodedPrompt, tokenizer: Tokenizer, tool_memory: ToolMemory) -> None:
        self.turn, self.encoded = turn, prompt
        self.completion_tokens = 0      # the last EOS left out
        self.reasoning_tokens = 0
        self.said: list[Event] = []
        self._tokenizer, self._tool_memory = tokenizer, tool_memory
        self._sampled: list[tuple[int, bytes | Control]] = []   # behind the reasoning
        self._call_ids: list[str] = []
        tools = () if turn.conversation.tools_banned else tuple(tool.name for tool in turn.conversation.tools)
        self._stream = AnswerStream(thinking=prompt.thinking, tools=tools, stop=turn.stop,
                                    fits=prompt.constraint.fits if prompt.constraint else None)
        self._sampling = _Samplings(turn, tokenizer)
        self._called = False   # its one call is complete
        self._masking = False  # the present step may not sample EOS
        self._masked_eos = 0   # steps whose best token was a masked EOS

    @property
    def done(self) -> bool:
        return self._stream.done or self._called

    @property
    def in_reasoning(self) -> bool:
        """The next token belongs to the reasoning."""
        return self._stream.in_reasoning

    @property
    def interruptible(self) -> bool:
        """No block of calls is open."""
        return self._stream.region is Region.OUTSIDE

    def sampling(self) -> Sampling:
        self._masking = self._stream.masks_eos and self._masked_eos < MAX_MASKED_EOS
        return self._sampling.of(greedy=self._stream.region in GREEDY_REGIONS, mask_eos=self._masking)

    def mask(self, vocab: int) -> np.ndarray | None:
        """bool [vocab], True for the tokens that may come next; None: all."""
        budget, constraint = self.turn.most_reasoning, self.encoded.constraint
        if self._stream.in_reasoning and budget is not None and self.reasoning_tokens >= budget:
            return np.arange(vocab) == self._tokenizer.control[THINK_CLOSE]
        return None if constraint is None else constraint.mask(self._stream.in_reasoning)

    def piece(self, token: int) -> bytes | Control:
        """What a token spells."""
        literal = self._tokenizer.literal(token)
        return self.bytes_of(token) if literal is None else Control(literal)

    def bytes_of(self, token: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(token)
        except ValueError:
            return REPLACEMENT

    def accept(self, step: Step) -> list[Event]:
        """What the token that was sampled says."""
        if self._masking and step.top[0][0] == self._tokenizer.eos:
            self._masked_eos += 1
        piece, thinking = self.piece(step.token), self._stream.in_reasoning
        if piece != Control(EOS):
            self.completion_tokens += 1
            self.reasoning_tokens += thinking
        if self.encoded.constraint is not None:
            self.encoded.constraint.accept(step.token, piece, thinking)
        if not thinking:
            self._sampled.append((step.token, piece))
        events: list[Event] = [self._named(event) for event in self._stream.push(piece)]
        self.said += events
        self._called = self.turn.one_call and any(isinstance(event, ToolCallEnd) for event in events)
        return events

    def close(self) -> list[Event]:
        """What the parser still holds where the answer ends: by itself, after its one call, or at its limit."""
        last = [] if self._stream.done else self._stream.finish("stop" if self._called else "length")
        self.said += last
        return last

    def end(self, usage: Usage) -> Finish:
        """Why the answer ended, once it is closed."""
        stream = self._stream
        return Finish(stream.finish_reason, usage, stream.stop_string, stream.error, stream.error_code)

    def _named(self, event: Event) -> Event:
        """A call that starts gets the id that the client will come back with."""
        if not isinstance(event, ToolCallStart):
            return event
        self._call_ids.append(new_call_id("toolu_" if self.turn.api == "anthropic" else "call_"))
        return replace(event, id=self._call_ids[-1])

    def ending(self) -> Ending:
        """How the state of a closed answer is to be left for the next turn."""
        stream = self._stream
        whole = stream.finish_reason == "stop" or stream.finish_reason == "tool_calls" and stream.exact_block
        cut = stream.finish_reason == "length" and stream.open_call is None
        if not stream.reasoning_closed or not (whole or cut) or self.encoded.key_of_answer is None:
            return Ending()
        replay = self._remember() if stream.finish_reason == "tool_calls" else None
        return Ending((self._tokenizer.eos,) if whole else (), lambda frontier: self._visible(replay, whole, frontier),
                      frozenset(self._call_ids))

    def _remember(self) -> Replay | None:
        """Keep the sampled block of calls, to be repeated token for token."""
        found = None if self._stream.implicit_close else cut_block(self._sampled)
        if found is None:
            return None
        lead, ids = found
        spelled = (piece.literal.encode() if isinstance(piece, Control) else piece
                   for _, piece in self._sampled[-len(ids):])
        text = b"".join(spelled).decode("utf-8", "replace")
        block = ToolBlock(tuple(self._call_ids), lead, text, ids)
        self._tool_memory.remember(block, gather(self.said).calls)
        return Replay(lead, ids, text)

    def _visible(self, replay: Replay | None, whole: bool, frontier: int) -> tuple[VisibleKey, ...]:
        """Keys of this answer as clients send it back: with its reasoning, and without.

        None for an answer to results alone: what stands before them is not in the request.
        """
        if self.encoded.wanted.results is not None and self.encoded.wanted.results.alone:
            return ()
        said = gather(self.said)
        calls = tuple(ToolCall(id, *call) for id, call in zip(said.call_ids, said.calls))
        reasoning = (Reasoning(said.reasoning),) if said.reasoning.strip() else ()
        shapes = [(*shape, TextPart(said.content), *calls) for shape in dict.fromkeys((reasoning, ()))]
        keys = [self.encoded.key_of_answer(Message("assistant", parts), replay, whole) for parts in shapes]
        return tuple(VisibleKey(key, VISIBLE[self.turn.api], frontier) for key in dict.fromkeys(keys))

    def blocks_in(self, tokens: Sequence[int]) -> tuple[ToolBlock, ...]:
        known = [part.id for message in self.turn.conversation.messages for part in message.parts
                 if isinstance(part, ToolCall)]
        return self._tool_memory.blocks_in([*known, *self._call_ids], tokens)


class _Samplings:
    """The request's sampling and its stricter variants, each made once: a step costs a lookup."""

    def __init__(self, turn: Turn, tokenizer: Tokenizer) -> None:
        banned = turn.sampling.banned
        if turn.conversation.tools_banned:
            banned |= {tokenizer.control[DSML]}
        self._plain = replace(turn.sampling, banned=banned)
        self._eos = tokenizer.eos
        self._made: dict[tuple[bool, bool], Sampling] = {(False, False): self._plain}

    def of(self, greedy: bool, mask_eos: bool) -> Sampling:
        made = self._made.get((greedy, mask_eos))
        if made is None:
            made = self._plain
            made = replace(made, temperature=0.0) if greedy else made
            if mask_eos:  # with the best token reported, to see whether it was EOS
                made = replace(made, banned=made.banned | {self._eos}, top_logprobs=max(1, made.top_logprobs))
            self._made[greedy, mask_eos] = made
        return made
