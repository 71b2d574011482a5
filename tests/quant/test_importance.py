"""Files of importance, and what is collected into them."""
from struct import pack

import numpy as np
import pytest
from gguf import GGUFReader

from ds4mlx.config import Settings
from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.writer import write_gguf
from ds4mlx.quant.importance import Entry, Importance, read, write

NAME = "blk.0.ffn_gate_exps.weight"
SUMS = np.arange(12, dtype=np.float32).reshape(3, 4) + 1


def of(path, expert=0, experts=3, columns=4, names=(NAME,)):
    return read(path).of(names, expert, experts, columns)


@pytest.fixture
def written(tmp_path, request):
    path = tmp_path / f"i.{request.param}"
    write(Importance(path, {NAME: Entry(SUMS, np.array([2, 0, 4], np.float32))}, "set.jsonl", 7))
    return path


def dat(path, values, name=NAME, calls=2, tail=b""):
    raw, values = name.encode(), np.asarray(values, "<f4")
    path.write_bytes(pack("<ii", 1, len(raw)) + raw + pack("<ii", calls, values.size) + values.tobytes() + tail)
    return path


@pytest.mark.parametrize("written", ["dat", "gguf"], indirect=True)
def test_what_is_written_is_read_again(written):
    assert np.array_equal(of(written, 0), SUMS[0] / 2) and np.array_equal(of(written, 2), SUMS[2] / 4)
    assert (read(written).dataset, read(written).chunks) == ("set.jsonl", 7)


@pytest.mark.parametrize("written", ["dat", "gguf"], indirect=True)
def test_an_expert_that_met_no_token_counts_evenly(written):
    assert np.array_equal(of(written, 1), [1, 1, 1, 1])


@pytest.mark.parametrize("written", ["gguf"], indirect=True)
def test_the_gguf_is_as_llama_cpp_lays_it_out(written):
    file = GGUFReader(written)
    tensors = {t.name: np.array(t.data) for t in file.tensors}
    assert np.array_equal(tensors[f"{NAME}.in_sum2"], SUMS)
    assert tensors[f"{NAME}.counts"].reshape(-1).tolist() == [2, 0, 4]
    assert file.fields["general.type"].contents() == "imatrix" and file.fields["imatrix.chunk_count"].contents() == 7


def test_a_dat_holds_means_times_calls(tmp_path):
    path = dat(tmp_path / "i.dat", SUMS, calls=4, tail=pack("<ii", 9, 3) + b"set")
    assert np.array_equal(of(path, 1), SUMS[1] / 4) and (read(path).dataset, read(path).chunks) == ("set", 9)


@pytest.mark.parametrize("calls", [0, -1, 1])
def test_a_dat_without_calls_holds_means(calls, tmp_path):
    assert np.array_equal(of(dat(tmp_path / "i.dat", SUMS, calls=calls), 2), SUMS[2])


@pytest.mark.parametrize("spelled", ["{}.expert.1", "{}.expert_1"])
def test_an_expert_may_have_an_entry_of_its_own(spelled, tmp_path):
    path = dat(tmp_path / "i.dat", SUMS[0], name=spelled.format(NAME), calls=1)
    assert np.array_equal(of(path, 1), SUMS[0]) and of(path, 0) is None


def test_an_entry_may_have_the_official_name(tmp_path):
    path = dat(tmp_path / "i.dat", SUMS[0], name="layers.0.ffn.experts.1.w1.weight", calls=1)
    assert np.array_equal(of(path, 1, names=(NAME, "layers.0.ffn.experts.1.w1.weight")), SUMS[0])


def test_one_row_is_for_all_experts(tmp_path):
    path = dat(tmp_path / "i.dat", SUMS[0], calls=1)
    assert np.array_equal(of(path, 2), SUMS[0])


def test_importance_of_another_model_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="need 3 x 5"):
        of(dat(tmp_path / "i.dat", SUMS), columns=5)


@pytest.mark.parametrize("damage", [
    lambda raw: raw[:20], lambda raw: raw[:-3], lambda raw: b"", lambda raw: pack("<i", -1) + raw[4:],
    lambda raw: pack("<ii", 1, 1 << 30) + raw[8:], lambda raw: pack("<i", 1 << 30) + raw[4:],
    lambda raw: pack("<i", 0) + raw[4:], lambda raw: raw[:-4] + pack("<f", float("nan")),
    lambda raw: raw[:-4] + pack("<f", -1)])
def test_a_damaged_dat_is_refused(damage, tmp_path):
    path = dat(tmp_path / "i.dat", SUMS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelFileError, match="i.dat"):
        read(path)


@pytest.mark.parametrize("counts", [(2, 1), (3, 2)])
def test_a_gguf_with_other_counts_than_rows_is_refused(counts, tmp_path):
    write_gguf(tmp_path / "i.gguf", {}, [(f"{NAME}.in_sum2", "F32", (3, 4), SUMS),
                                         (f"{NAME}.counts", "F32", counts, np.ones(counts, np.float32))])
    with pytest.raises(ModelFileError, match="a count for each row"):
        read(tmp_path / "i.gguf")


@pytest.mark.parametrize("path", ["none.dat", "."])
def test_what_is_no_file_is_refused(path, tmp_path):
    with pytest.raises(ModelFileError):
        read(tmp_path / path)


# ---- collected

PROMPT = [5, 9, 300, 4, 4, 17, 250]


def collected(tiny_path, prompts=(PROMPT,), **settings):
    from ds4mlx.engine.mlx_importance import collect
    return collect(Settings(ctx=1024, **settings), tiny_path, prompts)


def test_every_token_counts_once_for_each_expert_it_goes_to(tiny_path):
    found = collected(tiny_path)
    assert {int(squares.counts.sum()) for squares in found.values()} == {len(PROMPT) * 3}  # experts a token


def test_gate_and_up_read_what_the_router_reads(tiny_path):
    """In a hash-routed layer the table says who was met: its counts are those of the prompt's ids."""
    from ds4mlx.gguf.reader import GGUF
    with GGUF.open(tiny_path) as file:
        table = file.raw("blk.0.ffn_gate_tid2eid.weight").view("<i4")[PROMPT]
        experts = file.tensors["blk.0.ffn_gate_exps.weight"].shape[0]
    found = collected(tiny_path)
    assert np.array_equal(found["blk.0.ffn_up_exps.weight"].counts, np.bincount(table.reshape(-1), minlength=experts))


def test_inputs_are_normalised(tiny_path):
    """The tiny model's norm has ones for weights, so the squares of a token's input are 1 in the mean."""
    squares = collected(tiny_path)["blk.1.ffn_gate_exps.weight"]
    assert np.allclose(squares.sums.mean(axis=1)[squares.counts > 0], squares.counts[squares.counts > 0], rtol=1e-3)


def test_chunks_of_a_prompt_change_little(tiny_path):
    """Rows of a chunk see each other before they are rounded for the cache."""
    whole, split = (collected(tiny_path, [PROMPT * 40], prefill_chunk=chunk)["blk.2.ffn_down_exps.weight"]
                    for chunk in (512, 128))
    assert np.array_equal(whole.counts, split.counts) and np.allclose(whole.sums, split.sums, rtol=0.05, atol=1e-3)


def test_prompts_add_up(tiny_path):
    one, two, both = (collected(tiny_path, prompts)["blk.0.ffn_down_exps.weight"]
                      for prompts in ([PROMPT], [PROMPT[::-1]], [PROMPT, PROMPT[::-1]]))
    assert np.allclose(one.sums + two.sums, both.sums, rtol=1e-6)
