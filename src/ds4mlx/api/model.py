"""A model on this machine, and the sessions that it holds."""
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import get_ident
from typing import Self

import numpy as np

from ds4mlx.api.rendering import Messages, Rendered, Style, listed, request
from ds4mlx.api.session import Session
from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.messages import Conversation, Effort, Json
from ds4mlx.config import Settings
from ds4mlx.engine.open import open_engine
from ds4mlx.engine.protocol import Engine, ModelInfo, Sampling
from ds4mlx.engine.taps import Watcher
from ds4mlx.errors import UsageError
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.directions import Steering, read_steering
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat
from ds4mlx.service.constraint import constraint_of, is_free
from ds4mlx.service.encoding import Encoder, as_recommended, effort_profile
from ds4mlx.service.turn import EncodedPrompt, Turn
from ds4mlx.sessions.replay import ToolMemory
from ds4mlx.text.grammar import Vocabulary
from ds4mlx.text.segments import rendered_text
from ds4mlx.text.tokenizer import Tokenizer
from ds4mlx.tiny.files import BUILT_IN, TINY, path_of


def load(path: Path | str = TINY, settings: Settings = Settings()) -> "Model":
    """The model of a GGUF file, or a built-in one, "tiny" or "noise". Use it on the thread that loaded it.

    `settings` are those of the command line: Settings(ctx=65536). Which kernels compute is of the process: the last
    model's `ops` and `quality` hold for all. Raises ModelFileError, DoesNotFit, UsageError.
    """
    settings, path = settings.checked(), Path(path).expanduser()
    if path in BUILT_IN:
        path = path_of(path)
    with GGUF.open(path) as file:
        tokenizer, profile = Tokenizer.from_gguf(file.metadata), effort_profile(settings, file.metadata)
        config = Config.from_gguf(file.metadata)
        settings = as_recommended(replace(settings, model=path), file.metadata)
    # Sessions steer the engine, each in its own way: it begins as it was trained.
    engine = open_engine(replace(settings, dir_steering_file=None))
    return Model(engine, tokenizer, settings, profile, config)


class Model:
    """An open model. `engine` is what computes (`engine.protocol`), `tokenizer` its vocabulary."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: Settings, profile: EffortProfile,
                 config: Config) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self._thread, self._closed = get_ident(), False
        self.config = config    # sizes, and what kind each layer is of
        self._profile, self._steering = profile, read_steering(settings, config)
        self._steered: Steering | None = None   # what the engine does now
        self.calls = ToolMemory(0 if settings.disable_exact_dsml_tool_replay else settings.tool_memory_max_ids)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    def info(self) -> ModelInfo:
        """Name, largest context, vocabulary, quantisation, what computes."""
        return self.engine.info

    @property
    def sampling(self) -> Sampling:
        """How answers are drawn where nobody says: as the file recommends."""
        return Sampling() if self.settings.temp is None else Sampling(temperature=self.settings.temp)

    @property
    def path(self) -> Path:
        """The file that it was loaded from."""
        assert self.settings.model is not None
        return self.settings.model

    @property
    def layers(self) -> int:
        """How many layers there are; those of `taps` and of directions are counted from 0."""
        return self.config.num_hidden_layers

    def session(self, context: int | None = None, steering: Steering | None = None) -> Session:
        """An empty conversation of so many tokens at most (`settings.ctx`). Raises DoesNotFit.

        steering: along which directions, from the first token on; None is what the settings say. Raises UsageError for
        directions of another model, ValueError for a context that the model does not take.
        """
        self.require_usable()
        if steering is not None:
            if not isinstance(steering, Steering):
                raise UsageError(f"steering is {steering!r}, need ds4mlx.directions(...) or ds4mlx.Steering.read(...)")
            steering.require_fit(self.config)
        context = min(self.settings.ctx, self.info.context) if context is None else context
        session = Session(self, context, steering or self._steering)
        self._sessions.add(session)
        return session

    def steer(self, steering: Steering | None) -> None:
        """For the session that computes next, which calls this itself. Raises UsageError."""
        self.require_usable()
        if steering is self._steered:
            return
        if not isinstance(self.engine, Watcher):
            raise UsageError(f"{self.info.backend} cannot be steered; load the model with engine mlx")
        self.engine.steer(steering)
        self._steered = steering

    def lens(self, streams: np.ndarray) -> np.ndarray:
        """f32 [T, vocab]: the logits that the head makes of residual streams [T, N, D], as taps have them of any layer.

        Of the last layer's they are the model's own. Raises UsageError for an engine that has no taps, ValueError for
        another shape.
        """
        self.require_usable()
        if not isinstance(self.engine, Watcher):
            raise UsageError(f"{self.info.backend} has no taps; load the model with engine mlx")
        if np.shape(streams)[1:] != (needed := (self.config.hc_mult, self.config.hidden_size)):
            raise ValueError(f"streams are of shape {np.shape(streams)}, need (tokens, {needed[0]}, {needed[1]}), as "
                             "taps.layers[i].streams")
        return self.engine.lens(streams)

    def render(self, messages: str | Messages, tools: Sequence[dict[str, Json]] = (), *, thinking: bool | None = None,
               effort: Effort | None = None) -> Rendered:
        """The prompt that a server makes of a question, or of OpenAI's messages, and tools. Raises BadRequest."""
        _, _, prompt = self.encoded(request(listed(messages), Style(tuple(tools), thinking, effort)), self.settings.ctx)
        return Rendered(rendered_text(prompt.segments), list(prompt.wanted.ids))

    def encoded(self, body: dict[str, Json], context: int) -> tuple[Turn, Conversation, EncodedPrompt]:
        """A chat request as a server reads it, for a session of such a context. Raises BadRequest."""
        turn = read_chat(Fields(body), self.settings).turn
        encoder = Encoder(self.tokenizer, self.settings, self._profile, self.calls, lambda: context)
        return turn, *encoder.encode(turn)

    def held(self, conversation: Conversation, prompt: EncodedPrompt) -> EncodedPrompt:
        """With what the answer is held to: a call that must come, a format, strict tools. Raises BadRequest."""
        if is_free(conversation):
            return prompt
        return replace(prompt, constraint=constraint_of(conversation, self._vocabulary))

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.info.vocab)

    def close(self) -> None:
        """Give the memory back; its sessions are of no use after that."""
        self._closed = True
        for session in self._sessions:
            session.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        info = self.info
        return f"<Model {info.name}, {info.quant}, {self.layers} layers, {'closed' if self._closed else info.backend}>"

    def require_usable(self) -> None:
        """Raises ValueError where it is closed, UsageError on another thread than the one that loaded it."""
        if self._closed:
            raise ValueError("the model is closed; load it again")
        if get_ident() != self._thread:
            raise UsageError("a model belongs to the thread that loaded it, and this is another one; use it there, as "
                             "with a ThreadPoolExecutor(1) of its own, or ask a server with ds4mlx.connect")
