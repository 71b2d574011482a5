"""tokenizer.json to GGUF keys."""
import json

import pytest

from ds4mlx.errors import ModelFileError
from ds4mlx.text.segments import BOS, EOS, Text
from ds4mlx.text.tokenizer import Tokenizer
from ds4mlx.text.vocabulary import UNUSED, gguf_keys


def test_the_keys_are_the_same_vocabulary(v4_tokenizer_json, v4_tokenizer):
    keys = gguf_keys(json.loads(v4_tokenizer_json.read_text()), v4_tokenizer.vocab_size)
    text = [Text("def f(x):\n    return 'é中' + str(1234567)")]
    assert Tokenizer.from_gguf(keys).encode(text) == v4_tokenizer.encode(text)


def test_ids_without_a_token_are_filled_in(v4_tokenizer_json, v4_tokenizer):
    size = v4_tokenizer.vocab_size
    keys = gguf_keys(json.loads(v4_tokenizer_json.read_text()), size + 2)
    assert keys["tokenizer.ggml.tokens"][size:] == [f"[PAD{size}]", f"[PAD{size + 1}]"]
    assert keys["tokenizer.ggml.token_type"][size:] == [UNUSED, UNUSED]


@pytest.mark.parametrize("damage", [
    lambda v: v.pop("model"), lambda v: v["added_tokens"].clear(), lambda v: v["model"]["vocab"].update(x=99),
    lambda v: v["model"].update(vocab=[]), lambda v: v["added_tokens"].append({"content": "y", "id": 0})])
def test_what_is_no_vocabulary_of_the_model_is_refused(damage):
    vocabulary = {"model": {"vocab": {"a": 2}, "merges": []},
                  "added_tokens": [{"content": BOS, "id": 0}, {"content": EOS, "id": 1}]}
    damage(vocabulary)
    with pytest.raises(ModelFileError, match="tokenizer.json"):
        gguf_keys(vocabulary, 3)
