"""A tokenizer.json as the keys of a GGUF that hold the same vocabulary."""
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from ds4mlx.errors import ModelFileError
from ds4mlx.text.segments import BOS, EOS

NORMAL, CONTROL, UNUSED = 1, 3, 5   # tokenizer.ggml.token_type


class Bpe(TypedDict):
    vocab: dict[str, int]
    merges: Sequence[str | Sequence[str]]


class Added(TypedDict):
    id: int
    content: str


class Split(TypedDict):
    pattern: dict[str, str]


class TokenizerJson(TypedDict):
    """What is read of a tokenizer.json."""
    model: Bpe
    added_tokens: list[Added]
    pre_tokenizer: dict[str, list[Split]]


def gguf_keys(vocabulary: Mapping[str, object], size: int,
              source: str = "tokenizer.json") -> dict[str, str | int | bool | list[str] | list[int]]:
    """Keys for a model of `size` token ids; ids without a token get the name that other tools give them.

    Raises ModelFileError, naming `source`, where it is no byte-pair vocabulary or does not fit.
    """
    told = cast(TokenizerJson, vocabulary)  # whatever else it is, is caught
    try:
        base, added = told["model"]["vocab"], told["added_tokens"]
        ids = base | {entry["content"]: entry["id"] for entry in added}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]]
        tokens = {i: token for token, i in ids.items()}
        assert len(tokens) == len(ids) and all(isinstance(token, str) for token in ids)
        fits = not tokens or 0 <= min(tokens) <= max(tokens) < size
    except (KeyError, TypeError, AttributeError, AssertionError):
        raise ModelFileError(f"{source}: not a vocabulary of byte pairs, or two tokens share an id; give the "
                             "tokenizer.json of the checkpoint") from None
    if not fits or BOS not in ids or EOS not in ids:
        raise ModelFileError(f"{source}: needs {BOS} and {EOS} and ids of 0 to {size - 1}, got {len(ids)} tokens; give "
                             "the tokenizer.json of the checkpoint")
    kinds = [UNUSED if i not in tokens else NORMAL if tokens[i] in base else CONTROL for i in range(size)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids[BOS], "tokenizer.ggml.eos_token_id": ids[EOS],
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
