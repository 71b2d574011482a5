"""`ds4mlx compare`: logits against vectors, snapshots and themselves. Vectors here are made by `ds4mlx logprobs`."""
import json
import re

import pytest


@pytest.fixture
def compare(ds4mlx, tiny_path, tmp_path):
    (tmp_path / "text.txt").write_text("The river begins as a thin stream between two hills.")
    return lambda *arguments: ds4mlx("compare", "-m", tiny_path, *arguments)


@pytest.fixture
def vectors(ds4mlx, tiny_path, tmp_path):
    """A folder as ds4 has it, of what the tiny model itself says, which calls itself a 0731."""
    (tmp_path / "flash-0731" / "prompts").mkdir(parents=True)
    (tmp_path / "flash-0731" / "prompts" / "hello.txt").write_text("Hello there")
    said = json.loads(ds4mlx("logprobs", "-p", "Hello there", "-sys", "", "--nothink", "-m", tiny_path, "-n", "3").out)
    lines = ["case hello 4096 3 tests/test-vectors/prompts/hello.txt"]
    for step in said["steps"]:
        lines.append(f"step {step['step']} {bytes(step['selected']['bytes']).hex()} 20")
        lines += [f"top {bytes(top['token']['bytes']).hex()} {top['logprob']}" for top in step["top_logprobs"]]
    (tmp_path / "flash-0731" / "official.vec").write_text("\n".join([*lines, "end", ""]))
    return tmp_path / "flash-0731"


def test_a_model_agrees_with_vectors_of_its_own(compare, vectors):
    result = compare("--vectors", "flash-0731", "--tolerance", "0.01")     # one decode path made both
    assert (result.code, result.out.splitlines()[-1]) == (0, "1 of 1 hold")
    assert re.match(r"hello prompt_tokens=\d+ steps=3 holds\n", result.out)


def test_another_token_or_another_number_exits_with_3(compare, vectors):
    file = vectors / "official.vec"
    text = file.read_text()
    selected = re.search(r"step 1 (\w+)", text)[1]
    file.write_text(text.replace(f"step 1 {selected}", "step 1 2a"))
    wrong = compare("--vectors", "flash-0731/official.vec")
    assert wrong.code == 3 and "step 1: selected" in wrong.out and "step 0" not in wrong.out
    file.write_text(re.sub(r"(top \w+) -[\d.]+", r"\1 -30.0", text, count=1))
    assert compare("--vectors", "flash-0731").code == 3
    assert compare("--vectors", "flash-0731", "--tolerance", "99").code == 0


def test_vectors_of_another_checkpoint_are_no_test(compare, vectors):
    vectors.rename(vectors.with_name("older"))
    refused = compare("--vectors", "older")
    assert refused.code == 1 and refused.out == "" and "vectors of the first checkpoint" in refused.err
    assert compare("--vectors", "older", "--any-checkpoint").code == 0
    assert compare("--vectors", "older", "--effort-profile", "preview").code == 0


def test_a_snapshot_holds_for_the_weights_that_it_is_of(compare, tmp_path):
    assert compare("--capture", "mine.vec", "--prompt-file", "text.txt").code == 0
    result = compare("--vectors", "mine.vec")
    assert result.code == 0 and "text prompt_tokens=" in result.out and "max_abs=0.000000 holds" in result.out
    assert compare("--capture", "mine.vec", "--prompt-file", "text.txt").code == 1      # never replaced
    text = (tmp_path / "mine.vec").read_text()
    (tmp_path / "mine.vec").write_text(re.sub(r"# model \w+", "# model 00", text))
    assert "other weights" in compare("--vectors", "mine.vec").err
    (tmp_path / "text.txt").write_text("Quite another text, and one that is not any shorter than the first one was.")
    assert compare("--vectors", "mine.vec", "--any-checkpoint").code == 3


def test_decoding_gives_the_logits_of_a_prefill(compare):
    result = compare("--decode-consistency", "8", "--prompt-file", "text.txt", "--max-abs", "0.5")
    assert result.code == 0 and "steps=8" in result.out and "argmax=equal holds" in result.out
    apart = float(re.search(r"max_abs=([\d.]+)", result.out)[1])
    strict = compare("--decode-consistency", "8", "--prompt-file", "text.txt", "--max-abs", "0")
    assert strict.code == (3 if apart else 0)


def test_json_is_an_object_for_each_case(compare, vectors):
    steps = json.loads(compare("--json", "--decode-consistency", "2", "--prompt-file", "text.txt").out)
    assert (steps["steps"], steps["argmax"], steps["holds"], steps["faults"]) == (2, "equal", True, [])
    differs = compare("--json", "--vectors", "flash-0731", "--tolerance", "0")
    found, = map(json.loads, differs.out.splitlines())
    assert found["name"] == "hello" and differs.code == (0 if found["holds"] else 3) and found["steps"] == 3


@pytest.mark.parametrize("arguments, told", [
    ([], "--vectors"), (["--vectors", "x", "--capture", "y"], "--vectors"), (["--capture", "y"], "--prompt-file"),
    (["--vectors", "none"], "none"), (["--vectors", "x", "--prompt-file", "text.txt"], "--prompt-file"),
    (["--capture", "y", "--prompt-file", "a b"], "a b"),
    (["--decode-consistency", "0", "--prompt-file", "text.txt"], "--decode-consistency"),
    (["--vectors", "x", "--tolerance", "-1"], "--tolerance")])
def test_misuse_names_the_option(compare, arguments, told):
    result = compare(*arguments)
    assert result.code == 2 and result.out == "" and told in result.err.splitlines()[0]
