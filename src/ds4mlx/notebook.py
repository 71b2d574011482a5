"""The model for people who write Python: here, as mlx-lm's own tools take it."""
from collections.abc import Sequence
from pathlib import Path

from ds4mlx.chat.canonical import canonical
from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.messages import Json
from ds4mlx.config import Settings
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.names import validate
from ds4mlx.models.deepseek_v4.weights import load
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat
from ds4mlx.service.encoding import effort_profile
from ds4mlx.text.segments import rendered_text
from ds4mlx.text.tokenizer import Tokenizer
from ds4mlx.tiny.files import BUILT_IN, path_of


class MlxLmTokenizer:
    """A `Tokenizer` with the methods that mlx-lm's TokenizerWrapper calls."""
    chat_template: str | None = None  # the dialect renders, no template does

    def __init__(self, tokenizer: Tokenizer, profile: EffortProfile) -> None:
        self._tokenizer, self._profile = tokenizer, profile
        self.eos_token_id, self.bos_token_id = tokenizer.eos, tokenizer.bos
        self.bos_token, self.eos_token = tokenizer.literal(tokenizer.bos), tokenizer.literal(tokenizer.eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Control literals in `text` become control tokens: the caller wrote the prompt."""
        ids = self._tokenizer.encode_marked(text)
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, control tokens by their names."""
        return self._tokenizer.decode(ids)

    def apply_chat_template(self, messages: list[Json], tools: list[Json] | None = None, tokenize: bool = True,
                            thinking: bool = True, **_: object) -> list[int] | str:
        """The prompt that the server makes of OpenAI's messages and tools. Raises BadRequest."""
        body = Fields({"messages": messages, "tools": tools, "thinking": thinking})
        conversation = canonical(read_chat(body, Settings()).turn.conversation)
        segments = render(conversation, effort_profile=self._profile).segments
        return self._tokenizer.encode(segments) if tokenize else rendered_text(segments)

    def get_vocab(self) -> dict[str, int]:
        """The control tokens, by their names: what mlx-lm looks for in a vocabulary."""
        return dict(self._tokenizer.control)


def for_mlx_lm(path: Path | str, settings: Settings = Settings()) -> tuple[Model, MlxLmTokenizer]:
    """The model of a GGUF, or a built-in one, and its tokenizer: `mlx_lm.stream_generate(model, tokenizer, prompt)`.

    Raises ModelFileError. The file stays mapped as long as the model lives.
    """
    file = GGUF.open(path_of(Path(path)) if Path(path) in BUILT_IN else path)
    try:
        model = load(file, validate(file), settings.kv_round)
        return model, MlxLmTokenizer(Tokenizer.from_gguf(file.metadata), effort_profile(settings, file.metadata))
    except BaseException:
        file.close()
        raise
