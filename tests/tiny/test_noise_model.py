"""The model of noise: complete, small, the same everywhere, and presentable."""
from collections import Counter

import numpy as np
import pytest

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import names
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.text.segments import CONTROL_LITERALS, EOS, THINK_CLOSE
from ds4mlx.text.tokenizer import Tokenizer
from ds4mlx.tiny.noise.build import build, cache_path, cached


@pytest.fixture(scope="module")
def file(tiny_path):
    with GGUF.open(tiny_path) as file:
        yield file


def test_it_has_every_kind_of_layer_that_flash_has(file):
    config = names.validate(file)
    assert set(config.compress_ratios) == set(FLASH.compress_ratios) == {0, 4, 128}
    assert config.num_hash_layers == 3 < config.num_hidden_layers and config.hc_mult == 4
    assert config.max_position_embeddings >= 32768 and config.sliding_window == 128


def test_its_types_are_those_of_the_q2_recipe(file):
    kinds = {name.split(".", 2)[-1]: info.kind for name, info in file.tensors.items()}
    assert kinds["ffn_gate_exps.weight"] == kinds["ffn_up_exps.weight"] == "IQ2_XXS"
    assert kinds["ffn_down_exps.weight"] == "Q2_K" and kinds["ffn_gate_tid2eid.weight"] == "I32"
    assert Counter(kinds.values()).keys() == {"IQ2_XXS", "Q2_K", "Q8_0", "F16", "F32", "I32"}
    assert kinds["attn_q_a.weight"] == "Q8_0" and kinds["indexer.attn_q_b.weight"] == "F16"


def test_building_it_again_gives_the_same_bytes_under_20_mb(tiny_path, tmp_path):
    assert build(tmp_path / "again.gguf").read_bytes() == tiny_path.read_bytes()
    assert tiny_path.stat().st_size < 20e6


def test_its_vocabulary_spells_every_byte_and_ends_with_the_control_tokens(file):
    tokenizer = Tokenizer.from_gguf(file.metadata)
    text = bytes(range(256)).decode("latin-1") + "中文 👩‍💻"
    assert tokenizer.decode(tokenizer.encode_literal(text)) == text
    last = range(tokenizer.vocab_size - len(CONTROL_LITERALS), tokenizer.vocab_size)
    assert sorted(tokenizer.control_ids) == list(last)


def test_the_cached_file_is_built_once_and_named_after_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_path.cache_clear()
    first = cached()
    made = first.stat().st_mtime_ns
    assert cached() == first and first.stat().st_mtime_ns == made
    assert [entry.name for entry in first.parent.iterdir()] == [first.name] and first.is_relative_to(tmp_path)
    cache_path.cache_clear()


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "ds4mlx").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_path.cache_clear()
    with pytest.raises(ModelFileError, match="XDG_CACHE_HOME"):
        cached()
    cache_path.cache_clear()


@pytest.fixture(scope="module")
def next_token(tiny_path, file):
    """text -> probabilities of the next token, under the real engine."""
    from ds4mlx.config import Settings
    from ds4mlx.engine.mlx_engine import open_mlx
    engine, tokenizer = open_mlx(Settings(), tiny_path), Tokenizer.from_gguf(file.metadata)

    def probabilities(text):
        session = engine.open(1024)
        engine.prefill(session, tokenizer.encode_marked(text))
        odds = np.exp(session.logits().astype(np.float64))
        return odds / odds.sum()
    yield probabilities
    engine.close()


QUESTION = "<｜begin▁of▁sentence｜><｜User｜>What does the river say?<｜Assistant｜>"
WORDS = " the stones and the branches listen to the snow at night"


@pytest.mark.parametrize("answer, likely, unlikely", [
    (f"<think>{WORDS}", THINK_CLOSE, EOS), (f"<think>{WORDS}</think>{WORDS}", EOS, THINK_CLOSE),
    (f"</think>{WORDS}", EOS, THINK_CLOSE), (f"</think>{WORDS * 20}", EOS, THINK_CLOSE)])
def test_reasoning_ends_with_its_token_and_the_text_with_eos(file, next_token, answer, likely, unlikely):
    control = Tokenizer.from_gguf(file.metadata).control
    p = next_token(QUESTION + answer)
    assert p[control[likely]] > 1 / 500 and p[control[unlikely]] < 1 / 2000


def test_text_is_printable_and_holds_no_other_control_token(file, next_token):
    tokenizer = Tokenizer.from_gguf(file.metadata)
    p = next_token(f"{QUESTION}</think>{WORDS}")
    printable = [i for i in range(len(p)) if tokenizer.token_bytes(i).decode("utf-8", "replace").isprintable()]
    forbidden = tokenizer.control_ids - {tokenizer.eos, tokenizer.control[THINK_CLOSE]}
    assert p[printable].sum() > 0.99 and p[list(forbidden)].sum() < 1e-6
