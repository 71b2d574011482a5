"""Tensor names, and the check of a whole file: what is wrong is named, all of it, before weights are touched."""
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from sparse_model import SMALL, metadata_of, tensors_of, write_model

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.blocks import row_bytes
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.config import FLASH, PRO
from ds4mlx.models.deepseek_v4.names import expected_tensors, validate
from ds4mlx.models.fingerprint import weights_fp
from ds4mlx.models.registry import family_of, label
from ds4mlx.text.segments import CONTROL_LITERALS


@pytest.fixture
def check(tmp_path):
    """check(tensors={name: entry or None to leave out}, metadata={...}): validate a small model with these changes."""
    def run(tensors=None, metadata=None):
        changed = {**tensors_of(SMALL), **(tensors or {})}
        keys = {k: v for k, v in (metadata_of(SMALL) | (metadata or {})).items() if v is not None}
        path = write_model(tmp_path / "m.gguf", keys, {name: entry for name, entry in changed.items() if entry})
        with GGUF.open(path) as file:
            return validate(file)
    return run


def q4_bytes(need):
    kind = "Q4_K" if ".experts_" in need.path else need.kinds[0]
    return int(np.prod(need.shape[:-1], dtype=object)) * row_bytes(kind, need.shape[-1])


def test_flash_has_1328_tensors_of_the_published_q4_size():
    tensors = expected_tensors(FLASH)
    assert (len(tensors), sum(map(q4_bytes, tensors.values()))) == (1328, 164_628_167_004)


def test_pro_has_a_compressor_in_each_of_its_61_layers():
    names = expected_tensors(PRO)
    assert sum("attn_compressor_kv" in name for name in names) == 61
    assert names["blk.60.ffn_gate_exps.weight"].shape == (384, 3072, 7168)


def test_paths_are_unique_and_official():
    paths = [need.path for need in expected_tensors(FLASH).values()]
    assert len(set(paths)) == len(paths)
    assert {"embed", "hc_head_fn", "layers.3.attn.wq_a", "layers.4.attn.indexer.compressor.wkv", "layers.3.ffn.gate",
            "layers.3.ffn.gate_bias", "layers.0.ffn.gate_tid2eid", "layers.42.ffn.experts_w2"} <= set(paths)


def test_layers_hold_what_their_ratio_and_routing_need():
    names = expected_tensors(FLASH)
    assert "blk.1.attn_compressor_kv.weight" not in names and "blk.3.indexer.proj.weight" not in names
    assert names["blk.2.attn_compressor_ape.weight"].shape == (4, 1024)
    assert names["blk.3.attn_compressor_ape.weight"].shape == (128, 512)
    assert "blk.2.exp_probs_b.bias" not in names and "blk.3.ffn_gate_tid2eid.weight" not in names


def test_a_whole_file_gives_its_configuration(check):
    assert check() == SMALL


@pytest.mark.parametrize("kind", ["IQ2_XXS", "Q2_K", "Q4_K", "MXFP4", "Q8_0", "F16", "BF16", "F32"])
def test_layers_may_differ_in_the_type_of_their_experts(check, kind):
    assert check({f"blk.1.ffn_{part}_exps.weight": (kind, (8, 256, 256), None) for part in ("gate", "up", "down")})


def test_a_tensor_that_no_model_needs_is_let_be(check):
    assert check({"mtp.0.extra.weight": ("F32", (3,), None)}) == SMALL


@pytest.mark.parametrize("name, entry, message", [
    ("output.weight", None, r"output.weight is missing, need Q8_0 or .* \[64, 256\]"),
    ("blk.3.exp_probs_b.bias", None, "blk.3.exp_probs_b.bias is missing, need F32"),
    ("output.weight", ("Q8_0", (256, 64), None), r"output.weight is Q8_0 \[256, 64\], need .* \[64, 256\]"),
    ("output_norm.weight", ("F16", (256,), None), r"output_norm.weight is F16 \[256\], need F32 \[256\]"),
    ("output_norm.weight", ("F32", (1, 256), None), r"is F32 \[1, 256\], need F32 \[256\]"),
    ("blk.1.ffn_up_exps.weight", ("Q2_K", (8, 256, 256), None), "blk.1.ffn_up_exps.weight is Q2_K, need IQ2_XXS"),
    ("output_norm.weight", ("F32", (256,), np.full(256, np.nan, np.float32)), "has 256 values that are not finite"),
    ("blk.0.ffn_gate_tid2eid.weight", ("I32", (64, 3), np.full((64, 3), 8, np.int32)), "values 8 to 8, need 0 to 7"),
    ("blk.0.ffn_gate_tid2eid.weight", ("I32", (64, 3), np.full((64, 3), 2, np.int32)), "twice in 64 rows"),
])
def test_a_wrong_tensor_is_named_with_what_is_needed(check, name, entry, message):
    with pytest.raises(ModelFileError, match=message):
        check({name: entry})


def test_all_wrong_tensors_are_reported_in_one_error(check):
    with pytest.raises(ModelFileError) as error:
        check({"output.weight": None, "output_norm.weight": ("F32", (8,), None)})
    assert "output.weight is missing" in str(error.value) and "output_norm.weight is F32 [8]" in str(error.value)


def test_a_long_report_ends_with_a_count(check):
    with pytest.raises(ModelFileError) as error:
        check(dict.fromkeys(expected_tensors(SMALL)))
    lines = str(error.value).splitlines()
    assert len(lines) == 22 and lines[-1].strip() == f"and {len(expected_tensors(SMALL)) - 20} more"


@pytest.mark.parametrize("metadata, message", [
    ({"general.architecture": "llama"}, "general.architecture is 'llama', need 'deepseek4'"),
    ({"deepseek4.block_count": None}, "missing deepseek4.block_count"),
    ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokens has 2 entries, need 64"),
    ({"tokenizer.ggml.tokens": None}, "tokens is not there as an array of strings"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is not there as an array of strings"),
    ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(64)]}, "tokens lacks .*<think>"),
    ({"tokenizer.ggml.merges": None}, "merges is not there"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has another length than 64"),
    ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe', need 'joyai-llm'"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None, need 'joyai-llm'"),
    ({"tokenizer.ggml.tokens": [*CONTROL_LITERALS[:7], *map(str, range(57))]}, "tokens lacks .*latest_reminder"),
    ({"tokenizer.ggml.model": [1, 2]}, r"tokenizer.ggml.model is \[1, 2\] \(2 entries\), need 'gpt2'"),
    ({"tokenizer.ggml.model": "x" * 10**6}, "tokenizer.ggml.model is 'xxx.*, need 'gpt2'")])
def test_a_foreign_or_incomplete_file_is_refused(check, metadata, message):
    with pytest.raises(ModelFileError, match=message) as error:
        check(metadata=metadata)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("key", ["general.architecture", "deepseek4.block_count", "tokenizer.ggml.model"])
@pytest.mark.parametrize("value", ["\x1b[2J" * 10_000, ["\x1b[2J" * 10_000, "\n"]])
def test_what_a_file_says_cannot_flood_or_move_a_terminal(check, key, value):
    with pytest.raises(ModelFileError) as error:
        check(metadata={key: value})
    assert len(str(error.value)) < 400 and str(error.value).isprintable()


def test_an_absent_architecture_is_taken_from_the_keys(check):
    assert check(metadata={"general.architecture": None}) == SMALL


def test_the_registry_names_the_architecture_it_cannot_run():
    assert family_of({"general.architecture": "deepseek4"}).role("config").FLASH == FLASH
    assert family_of({"deepseek4.block_count": 43}).architecture == "deepseek4"
    with pytest.raises(ModelFileError, match="'llama', need one of deepseek4"):
        family_of({"general.architecture": "llama", "deepseek4.block_count": 43})


@pytest.mark.parametrize("value, shown", [
    ("a\x1b[2Jb", "a\ufffd[2Jb"), ("n" * 10**6, "n" * 200), ("DeepSeek V4 Flash", "DeepSeek V4 Flash"), (None, ""),
    (np.array([1, 2]), ""), (["a"], "")])
def test_a_name_in_a_file_is_shown_as_one_harmless_label(value, shown):
    assert label({"general.name": value}, "general.name") == shown


def fingerprint(path, metadata=None, tensors=None):
    write_model(path, metadata_of(SMALL) | (metadata or {}), {**tensors_of(SMALL), **(tensors or {})})
    with GGUF.open(path) as file:
        return weights_fp(file)


def test_the_fingerprint_is_that_of_the_weights_not_of_the_file(tmp_path):
    """Another name, chat template or order of tensors is the same model."""
    known = fingerprint(tmp_path / "a.gguf")
    assert re.fullmatch("[0-9a-f]{64}", known)
    moved = dict(reversed(tensors_of(SMALL).items()))
    write_model(tmp_path / "b.gguf", metadata_of(SMALL) | {"general.name": "b", "tokenizer.chat_template": "t"}, moved)
    with GGUF.open(tmp_path / "b.gguf") as file:
        assert weights_fp(file) == known


@pytest.mark.parametrize("change", [
    dict(metadata={"deepseek4.expert_weights_scale": 2.5}),
    dict(tensors={"output_norm.weight": ("F32", (256,), struct.pack("<256f", *[0] * 255, 1))}),
    dict(tensors={"output.weight": ("F16", (64, 256), None)}),
    dict(tensors={"extra": ("F32", (1,), None)})])
def test_the_fingerprint_follows_every_change_of_the_model(tmp_path, change):
    assert fingerprint(tmp_path / "a.gguf") != fingerprint(tmp_path / "b.gguf", **change)


def test_an_unaligned_vocabulary_size_is_no_obstacle(tmp_path):
    odd = replace(SMALL, vocab_size=67)
    with GGUF.open(write_model(tmp_path / "m.gguf", metadata_of(odd), tensors_of(odd))) as file:
        assert validate(file) == odd
