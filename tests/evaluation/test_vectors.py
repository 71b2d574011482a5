"""Files of logits to compare with, and what must agree."""
import numpy as np
import pytest

from ds4mlx.errors import UsageError
from ds4mlx.evaluation.vectors import (
    Golden, Official, Step, golden_faults, golden_text, log_softmax, read_vectors, step_faults)

OFFICIAL = """\
# remark
case one 16384 2 tests/test-vectors/prompts/one.txt
step 0 416461 2
top 416461 -0.002
top 2a2a -6.25
step 1 204c 1
top 204c -1e-07
end

case two 4096 1 two.txt
step 0 0a 0
end
"""
IDS = {bytes([65 + i]): [i] for i in range(8)}      # A is 0, B is 1, …
LOGITS = np.array([9, 5, 4, 3, 2, 1, 0, -1], np.float32)


def written(tmp_path, text):
    (tmp_path / "a.vec").write_text(text)
    return read_vectors(tmp_path / "a.vec")


def golden(top, size=64):
    return Golden("g", "text", 500, 400, "p.txt", tuple(top[:size]))


def test_official_vectors_are_bytes_and_logprobs(tmp_path):
    one, two = written(tmp_path, OFFICIAL).cases
    assert isinstance(one, Official) and (one.id, one.context) == ("one", 16384)
    assert one.steps == (Step(b"Ada", ((b"Ada", -0.002), (b"**", -6.25))), Step(b" L", ((b" L", -1e-7),)))
    assert (two.id, two.steps) == ("two", (Step(b"\n", ()),))


def test_a_snapshot_comes_back_as_it_was_written(tmp_path):
    case = golden([(5, 2.25), (7, float(np.float32(0.1)))])
    file = written(tmp_path, f"# model abc\n{golden_text(case)}\n")
    assert file.cases == (Golden("g", "text", 500, 400, "p.txt", ((5, 2.25), (7, pytest.approx(0.1, rel=1e-8)))),)
    assert file.model == "abc"
    assert np.float32(file.cases[0].top[1][1]) == np.float32(0.1)     # nine digits give a float32 back


@pytest.mark.parametrize("text", ["", "case one 1 2 p\nend", "case a 1 1 p\nstep 0 zz 0\nend",
                                  "case a 1 1 p\ntop 41 -1", "case a 1 1 p\nstep 1 41 0\nend",
                                  "case a x 1 p\nstep 0 41 0", "case a",
                                  "case g song 1 1 p 1\ntop 0 1 1", "case g text 1 1 p 2\ntop 0 1 1",
                                  "case a 1 1 p\nstep 0 41 0\nhop"])
def test_what_is_not_of_the_format_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match="a.vec"):
        written(tmp_path, text)


def test_prompts_are_found_beside_the_file_and_from_the_folders_above(tmp_path):
    file = written(tmp_path, OFFICIAL)
    with pytest.raises(UsageError, match="prompts"):
        file.prompt_file(file.cases[0])
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "one.txt").write_text("x")
    assert file.prompt_file(file.cases[0]) == tmp_path / "prompts" / "one.txt"


def test_a_step_agrees_by_bytes_and_within_the_tolerance():
    logprobs = log_softmax(LOGITS)
    near = Step(b"A", ((b"A", float(logprobs[0])), (b"C", float(logprobs[2]) - 3.9)))
    assert step_faults(near, LOGITS, IDS, 4.0) == [] and np.isclose(np.exp(logprobs).sum(), 1, atol=1e-12)
    assert len(step_faults(near, LOGITS, IDS, 3.8)) == 1
    assert "official b'B'" in step_faults(Step(b"B", ()), LOGITS, IDS, 4.0)[0]
    assert "spelled b'xyz'" in step_faults(Step(b"A", ((b"xyz", -1.0),)), LOGITS, IDS, 4.0)[0]


def test_a_snapshot_holds_against_its_own_logits_and_not_against_damaged_ones():
    logits = np.linspace(20, 0, 1000, dtype=np.float32)
    case = golden([(i, float(logits[i])) for i in range(64)])
    assert golden_faults(case, logits) == []
    damaged = logits.copy()
    damaged[2:20] -= 5      # the first token is the same, the distribution is not
    assert damaged.argmax() == logits.argmax() and any("20 likeliest" in f for f in golden_faults(case, damaged))
    assert "away" in golden_faults(case, logits - 9)[0]     # a shift changes no order
