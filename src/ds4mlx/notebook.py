"""The model for people who write Python: here, as mlx-lm's own tools take it."""
from collections.abc import Sequence
from pathlib import Path

from ds4mlx.config import Settings
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.names import validate
from ds4mlx.models.deepseek_v4.weights import load
from ds4mlx.text.tokenizer import Tokenizer


class MlxLmTokenizer:
    """A `Tokenizer` with the methods that mlx-lm's TokenizerWrapper calls."""
    chat_template: str | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos, tokenizer.bos
        self.bos_token, self.eos_token = tokenizer.literal(tokenizer.bos), tokenizer.literal(tokenizer.eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Control literals in `text` become control tokens: the caller wrote the prompt."""
        ids = self._tokenizer.encode_marked(text)
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.control)


def for_mlx_lm(path: Path | str, settings: Settings = Settings()) -> tuple[Model, MlxLmTokenizer]:
    """The model of a GGUF and its tokenizer, for `mlx_lm.stream_generate(model, tokenizer, prompt, …)`.

    Raises ModelFileError. The file stays mapped as long as the model lives.
    """
    file = GGUF.open(path)
    try:
        return load(file, validate(file), settings.kv_round), MlxLmTokenizer(Tokenizer.from_gguf(file.metadata))
    except BaseException:
        file.close()
        raise
