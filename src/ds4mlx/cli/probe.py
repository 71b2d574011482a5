"""A session at the end of a prompt, for the commands that show logits."""
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from ds4mlx.config import Settings
    from ds4mlx.engine.protocol import Engine, Session
    from ds4mlx.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Probe:
    engine: "Engine"
    session: "Session"
    tokenizer: "Tokenizer"
    settings: "Settings"
    prompt_tokens: int

    def logits(self) -> "np.ndarray":
        """f32 [V] for the next token. Raises Ds4Error where they are no numbers."""
        import numpy as np

        from ds4mlx.errors import Ds4Error
        logits = self.session.logits()
        if not np.isfinite(logits).all():
            raise Ds4Error(f"{np.count_nonzero(~np.isfinite(logits))} logits are not finite; the model file is damaged")
        return logits

    def token(self, token: int) -> dict[str, int | str | list[int]]:
        """A token for JSON. The bytes say what it is: a token can be a part of a character, which has no text."""
        try:
            spelling = self.tokenizer.token_bytes(token)
        except ValueError:
            spelling = b""  # an id that the vocabulary leaves unused
        return {"id": token, "text": spelling.decode("utf-8", "replace"), "bytes": list(spelling)}


def add_probe_flags(parser: ArgumentParser) -> None:
    from ds4mlx.cli.options import add_engine_flags, add_thinking_flags
    from ds4mlx.cli.prompt import add_prompt_flags
    parser.add_argument("file", nargs="?", metavar="FILE", help="a file with the question; - reads standard input")
    add_prompt_flags(parser)
    add_engine_flags(parser)
    add_thinking_flags(parser)


@contextmanager
def prefilled(args: Namespace) -> Iterator[Probe]:
    """The model that `args` mean, loaded, with their prompt in a session. Raises Ds4Error."""
    from ds4mlx.chat.events import Progress
    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    from ds4mlx.cli.prompt import checked_length, prompt_ids, question
    from ds4mlx.cli.prompt_bar import PromptBar
    from ds4mlx.cli.weights_bar import weights_bar
    from ds4mlx.config import color_wanted
    from ds4mlx.engine.open import open_engine
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.text.tokenizer import Tokenizer
    settings = settings_from(args)
    text = question(args, "file")
    settings = replace(settings, model=resolve_model(settings))
    with GGUF.open(settings.model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        ids = checked_length(prompt_ids(text, args, settings, tokenizer, file.metadata), settings.ctx)
    with engine_lock(settings, settings.model):
        engine = open_engine(settings, weights_bar())
        bar = PromptBar(color_wanted("auto", sys.stderr.isatty()))
        try:
            session = engine.open(min(settings.ctx, engine.info.context))
            for at in range(0, len(ids), settings.prefill_chunk):
                bar.take(Progress(at, len(ids)))
                engine.prefill(session, ids[at:at + settings.prefill_chunk])
            bar.close()
            yield Probe(engine, session, tokenizer, settings, len(ids))
        finally:
            bar.close()
            engine.close()
