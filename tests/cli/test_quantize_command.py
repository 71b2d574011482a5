"""`ds4mlx quantize` and `quantize imatrix` as a user runs them."""
import json
import signal
import time

import numpy as np
import pytest
from quant import checkpoints

from ds4mlx.gguf.reader import GGUF
from ds4mlx.quant.importance import Entry, Importance, read, write

DATASET = '{"prompt": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Hello."}\n\n"plain text, a line of it"\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("source") / "V4-0731", checkpoints.as_published())


@pytest.fixture
def dataset(tmp_path):
    (tmp_path / "set.jsonl").write_text(DATASET)
    return tmp_path / "set.jsonl"


def kinds(path):
    with GGUF.open(path) as file:
        return {name: info.kind for name, info in file.tensors.items()}


def test_a_checkpoint_becomes_a_file_that_the_engine_takes(ds4mlx, source):
    made = ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--recipe", "q2", "--verify")
    assert made.code == 0 and made.out == "" and "all within" in made.err
    shown = ds4mlx("inspect", "-m", "m.gguf", "--json")
    assert json.loads(shown.out)["checkpoint"] == "V4-0731"


def test_options_choose_the_types_of_families(ds4mlx, source):
    ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--recipe", "q4", "--routed-w2", "Q2_K", "--output", "F16")
    found = kinds("m.gguf")
    assert [found[name] for name in ("blk.0.ffn_down_exps.weight", "blk.0.ffn_up_exps.weight", "output.weight")] == [
        "Q2_K", "Q4_K", "F16"]


def test_a_dry_run_tells_the_size_that_the_file_will_have(ds4mlx, source, tmp_path):
    told = json.loads(ds4mlx("quantize", "--src", source, "--dry-run", "--recipe", "q8", "--json").out)
    assert not list(tmp_path.glob("*.gguf*"))
    ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--recipe", "q8")
    assert told["file_bytes"] == (tmp_path / "m.gguf").stat().st_size
    assert {t["name"]: t["type"] for t in told["tensors"]} == kinds("m.gguf")


def test_a_dry_run_shows_every_tensor(ds4mlx, source):
    out = ds4mlx("quantize", "--src", source, "--dry-run").out
    assert "blk.4.ffn_down_exps.weight" in out and "IQ2_XXS" in out and "1,048,576" in out


def test_one_tensor_can_be_compared(ds4mlx, source):
    compare = ("quantize", "--src", source, "--compare-tensor", "blk.3.ffn_down_exps.weight", "--json")
    alone = json.loads(ds4mlx(*compare).out)
    assert alone["different_blocks"] is None and 0.2 < alone["relative_error"] < 0.3  # of Q2_K
    ds4mlx("quantize", "--src", source, "--out", "m.gguf")
    assert json.loads(ds4mlx(*compare, "--out", "m.gguf").out)["different_blocks"] == 0


def test_verify_alone_finds_a_row_of_another_matrix(ds4mlx, source):
    ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--recipe", "q8")
    check = ("quantize", "--src", source, "--out", "m.gguf", "--recipe", "q8", "--verify")
    assert ds4mlx(*check).code == 0
    with GGUF.open("m.gguf") as file:
        at, row = file.tensors["blk.2.ffn_up_exps.weight"].offset, file.raw("blk.2.ffn_up_exps.weight")[0, 1].tobytes()
    with open("m.gguf", "r+b") as file:
        file.seek(at)
        file.write(row)
    failed = ds4mlx(*check)
    assert failed.code == 1 and "row 0 of layers.2.ffn.experts.0.w3.weight" in failed.err


def test_a_killed_conversion_goes_on(ds4mlx, start, source, tmp_path):
    ds4mlx("quantize", "--src", source, "--out", "whole.gguf")
    process, done = start("quantize", "--src", source, "--out", "m.gguf"), tmp_path / "m.gguf.partial.done"
    while process.poll() is None and not (done.exists() and done.read_text().count("\n") > 30):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--resume").code == 0
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_an_interrupted_conversion_says_how_to_go_on(start, source, tmp_path):
    process, done = start("quantize", "--src", source, "--out", "m.gguf"), tmp_path / "m.gguf.partial.done"
    while process.poll() is None and not done.exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume goes on" in err


@pytest.mark.parametrize("flags, message", [
    ([], "--src is missing"), (["--src", "x"], "--out is missing"),
    (["--src", "x", "--out", "y", "--resume", "--overwrite"], "one of them"),
    (["--src", "x", "--out", "y", "--threads", "0"], "--threads"),
    (["--src", "x", "--out", "y", "--recipe", "q3"], "q2-q4"),
    (["--src", "x", "--out", "y", "--shared", "Q9"], "--shared"), (["--bogus"], "unknown option: --bogus"),
    (["imatrix"], "--dataset is missing"), (["imatrix", "--dataset", "x"], "--out is missing"),
    (["imatrix", "--dataset", "x", "--out", "y", "-m", "noise"], "cannot be read")])
def test_misuse_names_the_option(flags, message, ds4mlx):
    misused = ds4mlx("quantize", *flags)
    assert misused.code == 2 and message in misused.err and misused.out == ""


@pytest.mark.parametrize("flags, message", [
    (["--src", "none", "--out", "m.gguf"], "none/config.json"),
    (["--src", ".", "--out", "m.gguf", "--imatrix", "none"], "none: No such file")])
def test_what_is_not_there_is_named(flags, message, ds4mlx):
    failed = ds4mlx("quantize", *flags)
    assert failed.code == 1 and message in failed.err


# ---- imatrix

@pytest.mark.parametrize("name", ["i.dat", "i.gguf"])
def test_importance_is_collected_and_used(name, ds4mlx, source, dataset, tmp_path):
    """From a file made of the checkpoint before, as one does."""
    ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--recipe", "q8")
    collected = ds4mlx("quantize", "imatrix", "-m", "m.gguf", "--dataset", dataset, "--out", name, "--no-lock")
    assert collected.code == 0 and "15 matrices from 2 prompts" in collected.err
    ds4mlx("quantize", "--src", source, "--out", "with.gguf", "--imatrix", name)
    with GGUF.open("with.gguf") as file:
        assert file.metadata["quantize.imatrix.dataset"] == "set.jsonl" and file.metadata["ds4mlx.imatrix_sha256"]
    told = json.loads(ds4mlx("quantize", "--src", source, "--dry-run", "--json", "--imatrix", name).out)
    assert {t["name"].split(".")[2] for t in told["tensors"] if t["weighed"]} == {
        "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}


def test_prompts_and_tokens_can_be_limited(ds4mlx, dataset):
    collect = ("quantize", "imatrix", "-m", "noise", "--dataset", dataset, "--out", "i.dat")
    assert "from 1 prompts" in ds4mlx(*collect, "--max-prompts", 1).err
    assert "4 of 4 tokens" in ds4mlx(*collect, "--max-tokens", 4).err


def test_control_tokens_of_a_prompt_are_tokens(ds4mlx, dataset):
    """begin, User, Hi, Assistant, </think>, Hello, . : at most a few more where words are split."""
    said = ds4mlx("quantize", "imatrix", "-m", "noise", "--dataset", dataset, "--out", "i.dat", "--max-prompts", 1).err
    assert int(said.split(" of ")[0].splitlines()[-1]) <= 12
    assert read(dataset.parent / "i.dat").chunks == 1


@pytest.mark.parametrize("name, columns, message", [
    ("blk.0.ffn_up_exps.weight", 128, "need 8 x 256"), ("blk.0.ffn_up_shexp.weight", 256, "has nothing for")])
def test_importance_of_another_model_is_refused(name, columns, message, ds4mlx, source, tmp_path):
    write(Importance(tmp_path / "i.dat", {name: Entry(np.ones((8, columns)), np.ones(8))}, "", 1))
    failed = ds4mlx("quantize", "--src", source, "--out", "m.gguf", "--imatrix", "i.dat")
    assert failed.code == 1 and message in failed.err


def test_matrices_that_importance_knows_nothing_of_are_told(ds4mlx, source, tmp_path):
    write(Importance(tmp_path / "i.dat", {"blk.0.ffn_up_exps.weight": Entry(np.ones((8, 256)), np.ones(8))}, "", 1))
    told = ds4mlx("quantize", "--src", source, "--dry-run", "--imatrix", "i.dat")
    assert told.code == 0 and "nothing for 14 matrices, blk.0.ffn_gate_exps.weight first" in told.err


@pytest.mark.parametrize("text, message", [
    ("", "holds no prompt"), ("{", "line 1 is no JSON"), ("[1]", "line 1 has no text"), ('{"a": 1}', "prompt, text"),
    ('{"prompt": ""}', "record 1 is empty"), ("3", "no text")])
def test_a_data_set_of_something_else_is_refused(text, message, ds4mlx, tmp_path):
    (tmp_path / "d.jsonl").write_text(text)
    failed = ds4mlx("quantize", "imatrix", "-m", "noise", "--dataset", "d.jsonl", "--out", "i.dat")
    assert failed.code == 2 and message in failed.err
