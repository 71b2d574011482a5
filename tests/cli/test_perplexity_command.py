"""`ds4mlx perplexity`: a text, token by token."""
import json
import math
import re

import numpy as np
import pytest

from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.evaluation.vectors import log_softmax
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.tokenizer import Tokenizer

TEXT = "The river begins as a thin stream between two hills. In spring it carries stones down to the valley. " * 2


@pytest.fixture
def perplexity(ds4mlx, tiny_path, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return lambda *arguments: ds4mlx("perplexity", "text.txt", "-m", tiny_path, *arguments)


def test_one_line_says_what_was_scored(perplexity):
    result = perplexity()
    found = dict(re.findall(r"(\w+)=([\d.]+)", result.out))
    assert result.code == 0 and list(found) == ["tokens", "scored", "nll", "avg_nll", "ppl"]
    assert int(found["scored"]) == int(found["tokens"]) - 32
    assert float(found["ppl"]) == pytest.approx(math.exp(float(found["avg_nll"])), rel=1e-5)    # six decimals


def test_it_is_the_sum_over_prefills_of_each_beginning(perplexity, tiny_path):
    with GGUF.open(tiny_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    ids = [tokenizer.bos, *tokenizer.encode_literal(TEXT)][:36]
    engine, nll = open_mlx(Settings(), tiny_path), 0.0
    for at in range(32, 36):
        session = engine.open(64)
        engine.prefill(session, ids[:at])
        nll -= log_softmax(session.logits())[ids[at]]
    engine.close()
    found = json.loads(perplexity("-n", "36", "--json").out)
    assert found["scored"] == 4 and np.isclose(found["nll"], nll, atol=1e-2)    # decode and prefill round apart


def test_a_text_longer_than_the_context_is_cut_and_it_is_said(perplexity):
    result = perplexity("-c", "40")
    assert "tokens=40 scored=8 " in result.out and "the first 40 of" in result.err


def test_without_a_text_there_is_nothing_to_do(ds4mlx):
    result = ds4mlx("perplexity")
    assert result.code == 2 and "FILE" in result.err


def test_a_text_of_the_seed_alone_is_refused(perplexity):
    result = perplexity("-n", "32")
    assert result.code == 1 and result.out == "" and "32 tokens" in result.err
