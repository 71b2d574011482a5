"""A turn of a conversation, end to end: the only place that sees both text and the engine.

Conversation -> prompt text -> ids -> the engine thread -> tokens -> events.
"""
import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ds4mlx.chat.canonical import canonical
from ds4mlx.chat.dialects.deepseek_v4 import DEFAULT_EFFORT, gate_effort, render
from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.dialects.prompt import Prompt
from ds4mlx.chat.messages import Conversation, Effort
from ds4mlx.config import Settings
from ds4mlx.engine.open import open_engine
from ds4mlx.engine.protocol import Engine, ModelInfo
from ds4mlx.errors import BadRequest
from ds4mlx.gguf.reader import GGUF
from ds4mlx.service.mailbox import Mailbox
from ds4mlx.service.scheduler import Scheduler, State
from ds4mlx.service.turn import Answer, EncodedPrompt, Turn
from ds4mlx.text.segments import Segment, Text
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

HOPELESS_CHARACTERS = 8  # to a token of the context: text that may still fit has 3 to 5
PIECE_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Health:
    """What `/health` tells."""
    state: State
    active: int
    queued: int
    slots: int = 1


class Service:
    """Answers turns, once started."""

    def __init__(self, open_engine: Callable[[], Engine], tokenizer: Tokenizer, settings: Settings,
                 effort_profile: EffortProfile = "0731") -> None:
        self.tokenizer, self.settings, self.effort_profile = tokenizer, settings, effort_profile
        self.scheduler = Scheduler(open_engine, context=settings.ctx, prefill_chunk=settings.prefill_chunk,
                                   max_queue=settings.max_queue, power=settings.power)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="render")
        self._warned_of_effort = False

    async def start(self) -> ModelInfo:
        """Load the model and compute one step. Raises what the engine raises: ModelFileError, DoesNotFit."""
        return await asyncio.to_thread(self.scheduler.start)

    async def run(self, turn: Turn) -> Answer:
        """The turn's events. Whatever can be known beforehand is raised here, before there is a stream: BadRequest."""
        loop = asyncio.get_running_loop()
        conversation, prompt = await loop.run_in_executor(self._pool, self._encode, turn)
        wanted = wanted_effort(turn.conversation, self.settings, self.effort_profile)
        lowered = conversation.effort if conversation.effort != wanted and conversation.thinking else None
        if lowered and not self._warned_of_effort:
            self._warned_of_effort = True
            log.warning("reasoning effort %s needs a larger context than %d tokens; using %s", wanted,
                        self.context, lowered)
        return self._submit(replace(turn, conversation=conversation), prompt, lowered)

    def complete(self, turn: Turn, ids: list[int]) -> Answer:
        """What follows `ids`, whatever they are: of the turn, all but its conversation counts. Raises BadRequest."""
        return self._submit(turn, EncodedPrompt(ids, len(ids), thinking=False))

    def _submit(self, turn: Turn, prompt: EncodedPrompt, lowered: Effort | None = None) -> Answer:
        self._check_bias(turn)
        self._check_length(len(prompt.ids), turn)
        wanted = self.settings.tokens if turn.max_tokens is None else turn.max_tokens
        answer = Answer(turn, prompt, min(wanted, self.context - len(prompt.ids)), tokenizer=self.tokenizer,
                        scheduler=self.scheduler, mailbox=Mailbox(asyncio.get_running_loop()),
                        stall_timeout_s=self.settings.send_stall_timeout, lowered_effort=lowered)
        self.scheduler.submit(answer)
        return answer

    async def close(self, drain_seconds: float) -> None:
        """Refuse what waits, let the active answer end within the time, then stop the engine thread."""
        await asyncio.to_thread(self.scheduler.close, drain_seconds)
        self._pool.shutdown()

    @property
    def info(self) -> ModelInfo:
        """The model, once started."""
        return self.scheduler.info

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.scheduler.context

    @property
    def health(self) -> Health:
        return Health(self.scheduler.state, self.scheduler.active, self.scheduler.queued)

    def _encode(self, turn: Turn) -> tuple[Conversation, EncodedPrompt]:
        """Takes a while for a long conversation. The two parts may be encoded apart: the second, where there is one,
        begins with a control token."""
        conversation = settled(turn.conversation, self.settings, self.effort_profile, self.context)
        prompt = render(conversation, effort_profile=self.effort_profile, layout=self.settings.prompt_layout)
        self._check_hopeless(prompt.segments, turn)
        said, opening = prompt.segments[:prompt.ends[-1]], prompt.segments[prompt.ends[-1]:]
        ids = self.tokenizer.encode(said)
        return conversation, EncodedPrompt(ids + self.tokenizer.encode(opening), len(ids), prompt.thinking)

    def _check_length(self, prompt_tokens: int, turn: Turn, said: str = "") -> None:
        context = self.context
        if prompt_tokens >= context:
            raise BadRequest(
                f"prompt is {said}{prompt_tokens} tokens, context size is {context} tokens: this server's maximum "
                f"context length is {context} tokens, and the answer needs one at least; shorten the conversation",
                param=turn.param, code="context_length_exceeded",
                details={"n_prompt_tokens": prompt_tokens, "n_ctx": context})

    def _check_hopeless(self, segments: Sequence[Segment], turn: Turn) -> None:
        """Refuse a prompt that is far too long by its beginning: 4 MB of digits took 15 s and 1.7 GB to encode.

        Pieces encoded apart have a few more tokens than together, so only twice the context is too long for sure.
        """
        texts = [segment.text for segment in segments if isinstance(segment, Text)]
        if sum(map(len, texts)) <= HOPELESS_CHARACTERS * self.context:
            return
        tokens = 0
        for text in texts:
            for start in range(0, len(text), PIECE_CHARACTERS):
                tokens += len(self.tokenizer.encode_literal(text[start:start + PIECE_CHARACTERS]))
                if tokens > 2 * self.context:
                    self._check_length(tokens, turn, "at least ")

    def _check_bias(self, turn: Turn) -> None:
        for token in turn.sampling.logit_bias:
            if not 0 <= token < self.info.vocab:
                raise BadRequest(f"logit_bias names token {token}; ids go from 0 to {self.info.vocab - 1}",
                                 param="logit_bias")


def open_service(settings: Settings) -> Service:
    """The service over the model file `settings.model`; nothing is loaded before `start`. Raises ModelFileError."""
    assert settings.model is not None, "resolve the model before opening a service"
    with GGUF.open(settings.model) as file:
        tokenizer, profile = Tokenizer.from_gguf(file.metadata), effort_profile(settings, file.metadata)
    return Service(lambda: open_engine(settings), tokenizer, settings, profile)


def wanted_effort(conversation: Conversation, settings: Settings, profile: EffortProfile) -> Effort:
    """As hard as the request says, else the settings, else the profile."""
    return conversation.effort or settings.default_effort or DEFAULT_EFFORT[profile]


def settled(conversation: Conversation, settings: Settings, profile: EffortProfile, context: int) -> Conversation:
    """The conversation as it is rendered: without client noise, with its effort decided, its tools in order."""
    effort = gate_effort(wanted_effort(conversation, settings, profile), profile, context, settings.think_max_min_ctx)
    tools = conversation.tools
    if settings.sort_tools:
        tools = tuple(sorted(tools, key=lambda tool: tool.name))
    return replace(canonical(conversation), effort=effort, tools=tools)


def prompt_for(conversation: Conversation, settings: Settings, metadata: Mapping[str, object]) -> Prompt:
    """The prompt that a server with these settings makes of a conversation, for a model file's `metadata`."""
    profile = effort_profile(settings, metadata)
    return render(settled(conversation, settings, profile, settings.ctx), effort_profile=profile,
                  layout=settings.prompt_layout)


def effort_profile(settings: Settings, metadata: Mapping[str, object]) -> EffortProfile:
    """Which effort texts the checkpoint was trained on: as set, else by the checkpoint's name in the file."""
    if settings.effort_profile != "auto":
        return settings.effort_profile
    names = [metadata.get("ds4mlx.checkpoint"), metadata.get("general.name")]
    name = next((name for name in names if isinstance(name, str) and name), "")
    return "0731" if "0731" in name else "preview"
