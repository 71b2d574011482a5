"""A loaded model for commands that look at logits of several texts."""
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ds4mlx.config import Settings
    from ds4mlx.engine.protocol import Engine, Session
    from ds4mlx.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: "Engine"
    tokenizer: "Tokenizer"
    settings: "Settings"
    metadata: Mapping[str, object]

    def open(self, context: int) -> "Session":
        return self.engine.open(min(context, self.settings.ctx, self.engine.info.context))

    def prefill(self, session: "Session", ids: Sequence[int]) -> None:
        """All of `ids`. A bar on a terminal."""
        from ds4mlx.chat.events import Progress
        from ds4mlx.cli.prompt_bar import PromptBar
        from ds4mlx.config import color_wanted
        bar = PromptBar(color_wanted("auto", sys.stderr.isatty()))
        try:
            for at in range(0, len(ids), self.settings.prefill_chunk):
                bar.take(Progress(at, len(ids)))
                self.engine.prefill(session, ids[at:at + self.settings.prefill_chunk])
        finally:
            bar.close()

    def feed(self, session: "Session", token: int, fed: Sequence[int]) -> None:
        """One token by a decode step, whatever the model would rather say; `fed`: those before, and this one."""
        from ds4mlx.engine.protocol import Row, Sampling
        self.engine.decode([Row(session, Sampling(temperature=0.0), token, fed)])

    def logits(self, session: "Session") -> "np.ndarray":
        """f32 [V] for the next token. Raises Ds4Error where they are no numbers."""
        import numpy as np

        from ds4mlx.errors import Ds4Error
        logits = session.logits()
        if bad := int(np.count_nonzero(~np.isfinite(logits))):
            raise Ds4Error(f"{bad} logits after {len(session.tokens)} tokens are not finite; the model file is damaged")
        return logits


@contextmanager
def loaded(settings: "Settings") -> Iterator[Loaded]:
    """The model that the settings mean, until the end of the block. Raises Ds4Error."""
    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.weights_bar import weights_bar
    from ds4mlx.engine.open import open_engine
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.text.tokenizer import Tokenizer
    settings = replace(settings, model=resolve_model(settings))
    with GGUF.open(settings.model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        with engine_lock(settings, settings.model), closing(open_engine(settings, weights_bar())) as engine:
            yield Loaded(engine, tokenizer, settings, file.metadata)


def chat_ids(model: Loaded, text: str, system: str | None = "") -> list[int]:
    """The prompt of one user's message, answered without reasoning. "" is no system text."""
    from ds4mlx.cli.prompt import prompt_ids
    asked = Namespace(raw_prompt=False, system=system)
    return prompt_ids(text, asked, replace(model.settings, default_thinking=False), model.tokenizer, model.metadata)
