"""Which type a tensor gets."""
import json
import shutil

import pytest
from oracle.weights import CONFIG

from ds4mlx.errors import UsageError
from ds4mlx.models.deepseek_v4.config import FLASH, Config
from ds4mlx.models.deepseek_v4.names import expected_tensors
from ds4mlx.quant.recipe import recipe

EXPECTED = expected_tensors(FLASH)
GATE, DOWN = "blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_down_exps.weight"


def kind(named, name, form="BF16", **overrides):
    return recipe(named, overrides).kind(name, EXPECTED[name], form, FLASH.num_hidden_layers)


@pytest.mark.parametrize("named, gate, down", [
    ("q2", "IQ2_XXS", "Q2_K"), ("q4", "Q4_K", "Q4_K"), ("q8", "Q8_0", "Q8_0"), ("f16", "F16", "F16")])
def test_recipes_are_named_by_their_experts(named, gate, down):
    assert (kind(named, GATE.format(7)), kind(named, DOWN.format(7))) == (gate, down)


def test_the_last_six_layers_of_q2_q4_have_four_bits():
    kinds = [kind("q2-q4", GATE.format(i)) for i in range(43)]
    assert kinds == ["IQ2_XXS"] * 37 + ["Q4_K"] * 6


@pytest.mark.parametrize("name, published", [
    ("token_embd.weight", "F16"), ("output.weight", "Q8_0"), ("blk.3.attn_q_b.weight", "Q8_0"),
    ("blk.3.ffn_up_shexp.weight", "Q8_0"), ("blk.3.ffn_gate_inp.weight", "F16"), ("blk.3.attn_norm.weight", "F32"),
    ("blk.2.indexer.attn_q_b.weight", "F16"), ("blk.0.ffn_gate_tid2eid.weight", "I32")])
@pytest.mark.parametrize("named", ["q2", "q4"])
def test_all_else_has_the_types_of_published_files(named, name, published):
    assert kind(named, name) == published


@pytest.mark.parametrize("form, exact", [("FP4", "MXFP4"), ("BF16", "BF16"), ("F32", "F32"), ("F16", "F16")])
def test_native_keeps_what_the_checkpoint_has(form, exact):
    assert kind("native", GATE.format(3), form) == exact


def test_native_takes_q8_0_for_fp8_which_gguf_does_not_have():
    assert kind("native", "blk.3.attn_q_b.weight", "FP8") == "Q8_0"
    assert kind("native", "blk.2.indexer.attn_q_b.weight", "FP8") == "F16"  # the indexer takes no blocks


@pytest.mark.parametrize("family, name", [
    ("experts", GATE.format(1)), ("routed_w2", DOWN.format(1)), ("attention", "blk.1.attn_output_a.weight"),
    ("shared", "blk.1.ffn_down_shexp.weight"), ("output", "output.weight")])
def test_families_can_be_given_another_type(family, name):
    assert kind("q2", name, **{family: "BF16"}) == "BF16"
    assert recipe("q2", {family: "BF16"}).describe() == f"q2 {family}=BF16"


def test_a_file_says_types_by_pattern(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "q2-q4"\n[tensors]\n"blk.4?.ffn_down_exps.weight" = "Q8_0"\n"output.weight" = "F16"\n')
    assert [kind(str(file), name) for name in (DOWN.format(42), GATE.format(42), DOWN.format(4), "output.weight")] == [
        "Q8_0", "Q4_K", "Q2_K", "F16"]


@pytest.mark.parametrize("text, message", [
    ("base = 3", "base"), ('base = "q9"', "base"), ("other = 1", "other"), ("[tensors]\nx = 'Q9'", "Q9"),
    ("[tensors]\nx = 4", "4"), ("tensors = 4", "tensors"), ("=", "not TOML")])
def test_a_file_that_says_something_else_is_refused(text, message, tmp_path):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        recipe(str(tmp_path / "r.toml"))


@pytest.mark.parametrize("named, overrides, message", [
    ("q3", {}, "q2-q4"), ("none.toml", {}, "No such file"), ("q2", {"experts": "Q9"}, "--experts"),
    ("q2", {"routed_w2": "Q3_K"}, "--routed-w2")])
def test_a_recipe_that_there_is_not_is_refused(named, overrides, message):
    with pytest.raises(UsageError, match=message):
        recipe(named, overrides)


@pytest.mark.parametrize("family, type_, message", [
    ("experts", "I32", "takes IQ2_XXS"), ("attention", "IQ2_XXS", "takes Q8_0"), ("output", "MXFP4", "takes Q8_0")])
def test_a_type_that_the_model_does_not_take_is_refused(family, type_, message):
    name = {"experts": GATE.format(0), "attention": "blk.0.attn_kv.weight", "output": "output.weight"}[family]
    with pytest.raises(UsageError, match=message):
        kind("q2", name, **{family: type_})


def test_rows_that_are_no_whole_blocks_are_refused():
    narrow = Config.from_official(CONFIG | {"moe_intermediate_size": 128})
    need = expected_tensors(narrow)[DOWN.format(0)]
    with pytest.raises(UsageError, match="rows of 128 weights, Q2_K needs a multiple of 256"):
        recipe("q2").kind(DOWN.format(0), need, "FP4", 5)


@pytest.mark.parametrize("told, temperature", [
    ({"do_sample": False, "temperature": 0.6}, 0.0), ({"do_sample": True, "temperature": 0.6}, 0.6), ({}, None)])
def test_the_file_recommends_the_temperature_of_the_checkpoint(few_bits, plan_of, tmp_path, told, temperature):
    shutil.copytree(few_bits, tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(told))
    assert plan_of(tmp_path / "source").metadata.get("general.sampling.temp") == temperature
