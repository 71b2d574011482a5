"""`ds4mlx logits` and `ds4mlx logprobs`: what the model thinks of the next token, exactly."""
import json

import numpy as np
import pytest

from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.tokenizer import Tokenizer

PROMPT = "The river begins as a thin stream"


@pytest.fixture(scope="module")
def expected(tiny_path):
    """Logits after BOS and PROMPT, from the engine itself."""
    with GGUF.open(tiny_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    engine = open_mlx(Settings(), tiny_path)
    session = engine.open(256)
    engine.prefill(session, [tokenizer.bos, *tokenizer.encode_literal(PROMPT)])
    yield session.logits()
    engine.close()


def test_logits_are_the_engines_own_to_nine_digits(ds4mlx, tiny_path, expected):
    report = json.loads(ds4mlx("logits", "-p", PROMPT, "--raw-prompt", "-m", tiny_path).out)
    assert np.array_equal(np.array(report["logits"], np.float32), expected)  # nine digits give every float32 back
    assert (report["source"], report["vocab"], report["argmax"]["id"]) == ("ds4mlx", 4096, expected.argmax())
    assert bytes(report["argmax"]["bytes"]).decode() == report["argmax"]["text"] and report["prompt_tokens"] > 1


def test_npy_takes_the_logits_out_of_the_json(ds4mlx, tiny_path, tmp_path, expected):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    report = json.loads(ds4mlx("logits", "prompt.txt", "--raw-prompt", "-m", tiny_path, "--npy", "out.npy").out)
    assert "logits" not in report and np.array_equal(np.load("out.npy"), expected)
    result = ds4mlx("logits", "prompt.txt", "-m", tiny_path, "--npy", "no/such/out.npy")
    assert result.code == 1 and result.out == "" and "no/such/out.npy" in result.err


def test_logprobs_follow_the_likeliest_token_and_are_normalised(ds4mlx, tiny_path, expected):
    report = json.loads(ds4mlx("logprobs", "-p", PROMPT, "--raw-prompt", "-m", tiny_path, "-n", "3").out)
    assert [step["step"] for step in report["steps"]] == [0, 1, 2] and report["top_k"] == 20
    top = report["steps"][0]["top_logprobs"]
    assert [entry["token"]["id"] for entry in top] == np.argsort(-expected, kind="stable")[:20].tolist()
    shift = np.log(np.exp(expected.astype(np.float64)).sum())
    assert all(abs(e["logit"] - shift - e["logprob"]) < 1e-6 for e in top)  # both are printed to nine digits
    assert all(step["selected"] == step["top_logprobs"][0]["token"] for step in report["steps"])


def test_logprobs_stop_at_the_end_of_the_answer(ds4mlx, tiny_path):
    arguments = ["logprobs", "-p", "one two", "--nothink", "-m", tiny_path, "--engine", "stub", "-n", "100"]
    report = json.loads(ds4mlx(*arguments, "--logprobs-top-k", "1").out)
    texts = [step["selected"]["text"] for step in report["steps"]]
    assert "".join(texts[:-1]) == "one two" and texts[-1] == "<｜end▁of▁sentence｜>"
    assert all(len(step["top_logprobs"]) == 1 for step in report["steps"])


def test_a_question_is_rendered_as_run_would(ds4mlx, tiny_path):
    counts = {flags: json.loads(
        ds4mlx("logits", "-p", "Hi", "-m", tiny_path, "--npy", "x", *flags).out)["prompt_tokens"]
              for flags in (("--raw-prompt",), ("--nothink",), ("--nothink", "-sys", ""), ("--think-max",))}
    run = json.loads(ds4mlx("run", "-p", "Hi", "-m", tiny_path, "--engine", "stub", "--nothink", "--format",
                            "json").out)
    assert counts["--nothink",] == run["usage"]["prompt_tokens"]
    assert counts["--raw-prompt",] < counts["--nothink", "-sys", ""] < counts["--nothink",] < counts["--think-max",]


def test_the_prompt_is_the_one_that_run_and_the_server_make(ds4mlx, tiny_path):
    asked = ["-p", "Hi", "-m", tiny_path, "--effort-profile", "preview", "--think-max"]  # max has no room in 32,768
    shown = json.loads(ds4mlx("logits", *asked, "--npy", "out.npy").out)
    answered = json.loads(ds4mlx("run", *asked, "-n", "1", "--format", "json", "--engine", "stub").out)
    assert shown["prompt_tokens"] == answered["usage"]["prompt_tokens"]
