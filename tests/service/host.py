"""A service over the scripted engine, driven turn by turn as a client would, and restarted at will."""
import asyncio
import time
from dataclasses import dataclass, replace

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.events import Finish, gather
from ds4mlx.chat.messages import Conversation, Message, Reasoning, TextPart, ToolCall
from ds4mlx.config import Settings
from ds4mlx.engine.protocol import Sampling
from ds4mlx.engine.stub import StubEngine
from ds4mlx.service.encoding import settled
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn
from ds4mlx.text.segments import ASSISTANT, CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer

BYTES = Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")  # every byte is a token


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as a client has it, and what it cost. `state`: tokens that the slot holds afterwards."""
    message: Message
    source: str
    reused: int
    prompt: int
    said: int
    computed: int      # tokens that the engine prefilled for it, the end of the answer included
    end: Finish
    line: str
    state: int


class Host:
    """answers: the texts to answer with, by the number of answers in the prompt; the last one again and again."""

    def __init__(self, answers, *, engine=StubEngine, tokenizer=BYTES, **settings):
        self.answers, self.tokenizer, self._engine = answers, tokenizer, engine
        self.settings = Settings(**{"ctx": 65536, "drain_seconds": 5, **settings})
        self._loop = asyncio.Runner()
        self._start()

    def _start(self):
        engines, self._stopped = [], False

        def open_engine():
            engines.append(self._engine(self._script, vocab=self.tokenizer.vocab_size, eos=self.tokenizer.eos))
            return engines[0]

        self.service = Service(open_engine, self.tokenizer, self.settings)
        try:
            self._loop.run(self.service.start())
        except BaseException:
            self.stop()
            raise
        self.engine, self.store = engines[0], self.service.scheduler.store
        self.slices = self.engine.slices if isinstance(self.engine, StubEngine) else []
        self.slices.clear()

    def _script(self, prompt):
        turn = list(prompt).count(self.tokenizer.control[ASSISTANT]) - 1
        return self.tokenizer.encode_marked(self.answers[min(max(turn, 0), len(self.answers) - 1)])

    def restart(self):
        self.stop()
        self._loop = asyncio.Runner()
        self._start()

    def stop(self):
        if not self._stopped:
            self._stopped = True
            self._loop.run(self.service.close(5))
            self._loop.close()

    def ask(self, conversation, *, api="chat", disconnect_after=None, settle=True, **turn):
        """The Reply to a conversation. disconnect_after: events that the client takes before it goes away. settle: wait
        until nothing more is done about it."""
        turn = Turn(conversation, Sampling(temperature=0.0), api=api, **turn)
        return self._reply(lambda: self.service.run(turn), disconnect_after, settle)

    def begin(self, conversation, *, api="chat", **turn):
        """An answer under way, to be taken by `end`."""
        turn = Turn(conversation, Sampling(temperature=0.0), api=api, **turn)
        return self._loop.run(self.service.run(turn))

    def end(self, answer, *, settle=True):
        """The Reply of a begun answer."""
        async def begun():
            return answer

        return self._reply(begun, settle=settle)

    def complete(self, ids, **turn):
        """The Reply to a prompt of these ids."""
        async def submit():
            return self.service.complete(Turn(talk(), Sampling(temperature=0.0), api="completions", **turn), ids)

        return self._reply(submit)

    def _reply(self, submit, limit=None, settle=True):
        before = len(self.slices)
        answer, events = self._loop.run(_read(submit, limit))
        if settle:
            self.settle()
        end = events[-1] if events and isinstance(events[-1], Finish) else None
        return Reply(_message(events), answer.source, answer.cached_tokens, answer.prompt_tokens,
                     end.usage.completion_tokens if end else 0, sum(self.slices[before:]), end,
                     answer.cache_line, len(self.tokens))

    def settle(self):
        """Waits until the engine thread is idle, and what it saved is on disk."""
        while self.service.health.active or self.service.health.queued:
            time.sleep(0.001)
        if self.store is not None:
            assert self.store.flush()

    @property
    def tokens(self):
        """What the slot holds."""
        slot = self.service.scheduler.slots[0]
        return list(slot.session.tokens) if slot is not None else []

    def prompt(self, conversation):
        """A prompt's length in tokens, rendered without any memory."""
        return self.tail(conversation, 0)

    def tail(self, conversation, messages):
        """Tokens of a prompt behind its first `messages` messages."""
        prompt = self._render(conversation)
        start = prompt.ends[messages - 1] if messages else 0
        return len(self.tokenizer.encode(prompt.segments[start:]))

    def key(self, conversation):
        """A prompt's key."""
        return self.tokenizer.key_bytes(self._render(conversation).segments)

    def _render(self, conversation):
        return render(settled(conversation, self.settings, "0731", self.settings.ctx), effort_profile="0731")


async def _read(submit, limit):
    answer, events = await submit(), []
    while not events or not isinstance(events[-1], Finish):
        if limit is not None and len(events) >= limit:
            await answer.aclose()
            break
        events += await answer.batch()
    return answer, events


def _message(events):
    """An answer as the client keeps it."""
    said = gather(events)
    reasoning = (Reasoning(said.reasoning),) if said.reasoning else ()
    calls = tuple(ToolCall(id, *call) for id, call in zip(said.call_ids, said.calls))
    return Message("assistant", (*reasoning, TextPart(said.content), *calls))


def user(text):
    return Message("user", (TextPart(text),))


def said(text):
    return Message("assistant", (TextPart(text),))


def system(*texts):
    return Message("system", tuple(map(TextPart, texts)))


def talk(*messages, **fields):
    return Conversation(messages, **fields)


def without_reasoning(message):
    return replace(message, parts=tuple(part for part in message.parts if not isinstance(part, Reasoning)))
