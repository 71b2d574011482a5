"""A turn of a conversation, end to end: the only place that sees both text and the engine.

Conversation -> prompt text -> ids -> the engine thread -> tokens -> events.
"""
import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.events import gather
from ds4mlx.chat.messages import Conversation, Effort
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.config import Settings
from ds4mlx.engine.open import open_engine
from ds4mlx.engine.protocol import Engine, ModelInfo, Progress
from ds4mlx.errors import BadRequest
from ds4mlx.gguf.reader import GGUF
from ds4mlx.service.answer import Answer
from ds4mlx.service.constraint import constraint_of
from ds4mlx.service.encoding import Encoder, as_recommended, effort_profile, wanted_effort
from ds4mlx.service.mailbox import Mailbox
from ds4mlx.service.metrics import Metrics
from ds4mlx.service.requests import Known
from ds4mlx.service.scheduler import Scheduler, State
from ds4mlx.service.trace import RequestTrace, Trace
from ds4mlx.service.trace_records import Asked
from ds4mlx.service.turn import EncodedPrompt, Turn
from ds4mlx.sessions.directory import CacheDirectory
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.lookup import Wanted
from ds4mlx.sessions.policy import SaveRules
from ds4mlx.sessions.replay import ToolMemory
from ds4mlx.sessions.store import Store, StoreOptions
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.escaping import escaped
from ds4mlx.text.grammar import Vocabulary
from ds4mlx.text.segments import BOS, Control, Text, Tokens, rendered_text
from ds4mlx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENGINE_ABI = 1           # of the states on disk: raise it when the same tokens come to give another state
_INVOKED = re.compile(r'invoke name="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Health:
    """What `/health` tells."""
    state: State
    active: int
    queued: int
    slots: int


class Service:
    """Answers turns, once started."""

    def __init__(self, open_engine: Callable[[], Engine], tokenizer: Tokenizer, settings: Settings,
                 effort_profile: EffortProfile = "0731") -> None:
        self.tokenizer, self.settings, self.effort_profile = tokenizer, settings, effort_profile
        self.trace: Trace | None = None     # set by who wants conversations written down in full; closed with it
        self.scheduler = Scheduler(open_engine, tokenizer, context=settings.ctx, slots=settings.batched_session,
                                   prefill_chunk=settings.prefill_chunk, quantum=settings.mixed_prefill_quantum,
                                   max_queue=settings.max_queue, power=settings.power, open_store=self._open_store)
        self.scheduler.told = self._happened
        self._tool_memory = ToolMemory(0 if settings.disable_exact_dsml_tool_replay else settings.tool_memory_max_ids,
                                       read_calls=self._calls_of, on_disk=self._saved_block)
        self._encoder = Encoder(tokenizer, settings, effort_profile, self._tool_memory, lambda: self.context)
        self.metrics = Metrics()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="render")
        self._warned_of_effort = False

    async def start(self) -> ModelInfo:
        """Load the model and compute one step. Raises what the engine raises: ModelFileError, DoesNotFit; and first of
        all, CheckpointError for a cache directory that cannot be used."""
        if self.settings.kv_disk_dir is not None:   # a model takes minutes to load
            CacheDirectory(self.settings.kv_disk_dir.expanduser()).close()
        info = await asyncio.to_thread(self.scheduler.start)
        self._vocabulary = Vocabulary(self.tokenizer, info.vocab)
        return info

    async def run(self, turn: Turn) -> Answer:
        """The turn's events. Whatever can be known beforehand is raised here, before there is a stream: BadRequest."""
        loop = asyncio.get_running_loop()
        conversation, prompt = await loop.run_in_executor(self._pool, self._prepare, turn)
        wanted = wanted_effort(turn.conversation, self.settings, self.effort_profile, turn.api)
        lowered = conversation.effort if conversation.effort != wanted and conversation.thinking else None
        if lowered and not self._warned_of_effort:
            self._warned_of_effort = True
            log.warning("reasoning effort %s needs a larger context than %d tokens; using %s", wanted,
                        self.context, lowered)
        return self._submit(replace(turn, conversation=conversation), prompt, lowered)

    def complete(self, turn: Turn, ids: list[int]) -> Answer:
        """What follows `ids`, whatever they are: of the turn, all but its conversation counts. Raises BadRequest."""
        segments = (Tokens(tuple(ids), self.tokenizer.decode(ids)),)
        wanted = Wanted(ids, self.tokenizer.key_bytes_of_ids(ids), "completions")
        return self._submit(turn, EncodedPrompt(wanted, segments, 0, thinking=False))

    async def complete_text(self, turn: Turn, text: str) -> Answer:
        """What follows `text`, with no conversation around it and nothing special in it. Raises BadRequest."""
        def encode() -> list[int]:
            segments = (Control(BOS), Text(text))
            self._encoder.check_hopeless(segments, turn)
            return self.tokenizer.encode(segments)

        return self.complete(turn, await asyncio.get_running_loop().run_in_executor(self._pool, encode))

    async def count(self, turn: Turn) -> int:
        """Tokens of the turn's prompt."""
        return len((await self.rendered(turn))[0])

    async def rendered(self, turn: Turn) -> tuple[list[int], str]:
        """The turn's prompt as `run` would compute it: its ids, and its text with control tokens by their names.
        Nothing waits for the engine. Raises BadRequest."""
        _, prompt = await asyncio.get_running_loop().run_in_executor(self._pool, self._encoder.encode, turn)
        return list(prompt.wanted.ids), rendered_text(prompt.segments)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The bytes of each token as text that may be printed."""
        return [escaped(self.tokenizer.token_bytes(token)) for token in ids]

    def _submit(self, turn: Turn, prompt: EncodedPrompt, lowered: Effort | None = None) -> Answer:
        self._check_bias(turn)
        self._encoder.check_length(len(prompt.wanted.ids), turn)
        wanted = self.settings.tokens if turn.max_tokens is None else turn.max_tokens
        answer = Answer(turn, prompt, min(wanted, self.context - len(prompt.wanted.ids)), tokenizer=self.tokenizer,
                        scheduler=self.scheduler, mailbox=Mailbox(asyncio.get_running_loop()),
                        stall_timeout_s=self.settings.send_stall_timeout, tool_memory=self._tool_memory,
                        metrics=self.metrics, lowered_effort=lowered, trace=self._traced(turn, prompt, wanted))
        self.scheduler.submit(answer)
        return answer

    def _traced(self, turn: Turn, prompt: EncodedPrompt, max_tokens: int) -> RequestTrace | None:
        if self.trace is None:
            return None
        began, name = time.time(), self.info.name
        return self.trace.request(self.tokenizer, prompt.replays,
                                  lambda: _asked(turn, prompt, max_tokens, began, name))

    def _happened(self, event: str) -> None:
        if self.trace is not None:
            self.trace.happened(event)

    async def close(self, drain_seconds: float) -> None:
        """Refuse what waits, let the active answer end within the time, then stop the engine thread."""
        await asyncio.to_thread(self.scheduler.close, drain_seconds)
        self._pool.shutdown()
        if self.trace is not None:
            self.trace.close()

    def requests(self) -> list[Known]:
        """Those that run, then those that wait in their order."""
        return [answer.known() for answer in self._answers()]

    def cancel(self, request_id: str) -> bool:
        """Give a request up; False when there is none of that id. Its client is told."""
        found = [answer for answer in self._answers() if answer.turn.request_id == request_id]
        for answer in found:
            self.scheduler.cancel(answer, "cancelled_by_id")
        return bool(found)

    def _answers(self) -> list[Answer]:
        return [request for request in self.scheduler.requests if isinstance(request, Answer)]

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
        return Health(self.scheduler.state, self.scheduler.active, self.scheduler.queued, len(self.scheduler.slots))

    def _prepare(self, turn: Turn) -> tuple[Conversation, EncodedPrompt]:
        """The prompt, and what the answer is held to."""
        conversation, prompt = self._encoder.encode(turn)
        return conversation, replace(prompt, constraint=constraint_of(conversation, self._vocabulary))

    # ---- states on disk

    def _open_store(self, engine: Engine, context: int) -> Store | None:
        """Called on the engine thread. Raises CheckpointError for a directory that cannot be used."""
        s, info = self.settings, engine.info
        if s.kv_disk_dir is None:
            return None
        rules = SaveRules(s.kv_cache_min_tokens, s.kv_cache_cold_max_tokens, s.kv_cache_continued_interval_tokens,
                          s.kv_cache_boundary_trim_tokens, s.kv_cache_boundary_align_tokens)
        options = StoreOptions(s.kv_disk_space_mb << 20, rules, s.kv_cache_reject_different_quant, s.kv_cache_verify)
        identity = Identity(info.base or info.fingerprint, info.fingerprint, self.tokenizer.fingerprint(), info.layout,
                            ENGINE_ABI, info.quant_bits)
        return Store(s.kv_disk_dir.expanduser(), identity, engine.arrays, context, options)

    def _saved_block(self, call_id: str) -> ToolBlock | None:
        store = self.scheduler.store
        return store.tool_block(call_id) if store is not None else None

    def _calls_of(self, block: ToolBlock) -> tuple[tuple[str, str], ...]:
        """The calls that a saved block spells, as they were sent to the client."""
        stream = AnswerStream(thinking=False, tools=_INVOKED.findall(block.text))
        events = list(stream.push(block.lead.encode())) if block.lead else []
        for token in block.ids:
            literal = self.tokenizer.literal(token)
            events += stream.push(self.tokenizer.token_bytes(token) if literal is None else Control(literal))
        return gather(events).calls

    # ---- checks

    def _check_bias(self, turn: Turn) -> None:
        for token in turn.sampling.logit_bias:
            if not 0 <= token < self.info.vocab:
                raise BadRequest(f"logit_bias names token {token}; ids go from 0 to {self.info.vocab - 1}",
                                 param="logit_bias")


def open_service(settings: Settings, progress: Progress | None = None) -> Service:
    """The service over the model file `settings.model`; nothing is loaded before `start`, which tells `progress`.

    Raises ModelFileError."""
    assert settings.model is not None, "resolve the model before opening a service"
    with GGUF.open(settings.model) as file:
        tokenizer, profile = Tokenizer.from_gguf(file.metadata), effort_profile(settings, file.metadata)
        settings = as_recommended(settings, file.metadata)
    return Service(lambda: open_engine(settings, progress), tokenizer, settings, profile)


def _asked(turn: Turn, prompt: EncodedPrompt, max_tokens: int, began: float, model: str) -> Asked:
    """What a trace tells of a request before anything is done about it."""
    sampling, received = turn.sampling, turn.received
    return Asked(
        time=round(began, 3), id=turn.request_id, kind="completion" if turn.api == "completions" else "chat",
        api=turn.api, model=received.model if received and received.model else model,
        stream=received is not None and received.stream, tools=len(turn.conversation.tools),
        think_mode=turn.conversation.effort or "on" if prompt.thinking else "off",
        prompt_tokens=len(prompt.wanted.ids), max_tokens=max_tokens, temperature=sampling.temperature,
        top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, seed=sampling.seed,
        raw=received.body.decode("utf-8", "backslashreplace") if received else "",
        prompt=rendered_text(prompt.segments))
