"""Checkpoints of every kind to files, and what the files compute."""
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracle.weights import CONFIG, official_to_gguf_arrays
from quant import checkpoints

from ds4mlx.gguf.dequant import dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import weights as loader
from ds4mlx.models.deepseek_v4.names import validate
from ds4mlx.quant.conversion import convert
from ds4mlx.quant.stored import E4M3
from ds4mlx.text.tokenizer import Tokenizer

EXPECTED = Path(__file__).parents[1] / "oracle" / "expected.npz"
LENGTH = 130    # of the prompt: past the window, with compressed rows


def logits(path):
    with np.load(EXPECTED) as data, GGUF.open(path) as file:
        model = loader.load(file, validate(file), "none")
        return np.array(model(mx.array(data[f"p{LENGTH}.input_ids"])[None])[0])


@pytest.fixture(scope="module")
def expected():
    """What transformers computed with these weights (tests/oracle/README.md)."""
    with np.load(EXPECTED) as data:
        return data[f"p{LENGTH}.logits"]


def arrays(path):
    with GGUF.open(path) as file:
        return {name: dequantize(file.raw(name), info.kind).copy() for name, info in file.tensors.items()}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("named", ["native", "f16"])
def test_every_weight_is_exact(named, published, converted):
    """The oracle's weights are numbers of BF16 and of F16."""
    wanted = {name: array.astype(np.float32) for name, array in official_to_gguf_arrays(checkpoints.official()).items()}
    assert same(arrays(converted(published, named)), wanted)


def test_the_native_recipe_computes_what_transformers_does(published, converted, expected):
    assert np.abs(logits(converted(published, "native")) - expected).max() < 5e-5  # float32 sums in another order


@pytest.mark.parametrize("named, most", [("q8", 0.004), ("q4", 0.1), ("q2", 0.6)])
def test_logits_are_within_the_rounding_of_the_types(named, most, published, converted, expected):
    """Share of the logits' energy that is lost. Of the weights' Q8_0 loses 5e-5, Q4_K 0.5 %, IQ2_XXS 11 %, in each of
    five layers of which all compute with the error of those before; another expert or row is chosen now and then."""
    found = logits(converted(published, named))
    assert np.square(found - expected).sum() / np.square(expected).sum() < most


def test_fp4_experts_are_kept_bit_for_bit(few_bits, converted):
    wanted = official_to_gguf_arrays(checkpoints.in_few_bits()[1])
    with GGUF.open(converted(few_bits, "native")) as file:
        for name in (f"blk.4.ffn_{part}_exps.weight" for part in ("gate", "up", "down")):
            assert file.tensors[name].kind == "MXFP4"
            assert np.array_equal(dequantize(file.raw(name), "MXFP4"), wanted[name].astype(np.float32))


def test_fp8_matrices_are_decoded_with_the_scale_of_their_block(few_bits, converted):
    """In F16, which holds three bits of mantissa and these exponents."""
    wanted = official_to_gguf_arrays(checkpoints.in_few_bits()[1])
    found = arrays(converted(few_bits, "f16"))
    assert same(found, {name: array.astype(np.float32) for name, array in wanted.items()})


def test_fp4_experts_as_they_are_compute_what_decoded_ones_do(few_bits, converted, plan_of, tmp_path):
    convert(plan_of(few_bits, "f16", experts="MXFP4"), tmp_path / "m.gguf")
    found, wanted = logits(tmp_path / "m.gguf"), logits(converted(few_bits, "f16"))
    assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()  # float32 sums in another order


def test_every_code_of_fp8_is_what_mlx_takes_it_for():
    codes = mx.array(np.arange(256, dtype=np.uint8))
    assert np.array_equal(E4M3, np.array(mx.from_fp8(codes, mx.float32)), equal_nan=True)


def named_by_transformers():
    """Official name -> name of the module, spelled out here for one layer of each kind, by hand."""
    layer = {
        "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
        "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
        "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn.wq_a.weight": "self_attn.q_a_proj.weight", "attn.q_norm.weight": "self_attn.q_a_norm.weight",
        "attn.wq_b.weight": "self_attn.q_b_proj.weight", "attn.wkv.weight": "self_attn.kv_proj.weight",
        "attn.kv_norm.weight": "self_attn.kv_norm.weight", "attn.attn_sink": "self_attn.sinks",
        "attn.wo_a.weight": "self_attn.o_a_proj.weight", "attn.wo_b.weight": "self_attn.o_b_proj.weight",
        "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
        "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
        "ffn.gate.tid2eid": "mlp.gate.tid2eid"}
    for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        layer[f"ffn.shared_experts.{ours}.weight"] = f"mlp.shared_experts.{theirs}_proj.weight"
    for ours, theirs in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer")):
        layer |= {f"attn.{ours}.{a}": f"self_attn.{theirs}.{b}" for a, b in (
            ("wkv.weight", "kv_proj.weight"), ("wgate.weight", "gate_proj.weight"), ("ape", "position_bias"),
            ("norm.weight", "kv_norm.weight"))}
    top = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight",
           "norm.weight": "model.norm.weight"}
    top |= {f"hc_head_{x}": f"model.hc_head.hc_{x}" for x in ("fn", "base", "scale")}
    return {name: f"model.layers.{name.split('.')[1]}.{layer[name.split('.', 2)[2]]}" if name.startswith("layers.")
            else top[name] for name in checkpoints.official() if ".experts." not in name}


def saved_by_transformers(name):
    """As version 5.24 saves a model: official names in layers, behind a prefix, but for one."""
    top = {"embed.weight": "model.embed_tokens.weight", "head.weight": "head.weight"}
    if name.startswith("hc_head_"):
        return name.replace("hc_head_", "model.hc_head.hc_")
    return top.get(name) or f"model.{name}".replace("attn.kv_norm.", "attn.norm.")


TRANSFORMERS_CONFIG = {key: value for key, value in CONFIG.items()
                       if key not in ("compress_ratios", "num_hash_layers", "rope_scaling", "rope_theta",
                                      "compress_rope_theta")} | {
    "layer_types": ["sliding_attention", "sliding_attention", "compressed_sparse_attention",
                    "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
        "compress": {"rope_type": "yarn", "rope_theta": 160000, "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536, "attention_factor": 1.0}}}


@pytest.mark.parametrize("way", ["modules", "saved", "prefixed"])
def test_checkpoints_of_transformers_are_the_same_model(way, published, converted, plan_of, tmp_path):
    tensors = {"modules": lambda: checkpoints.as_transformers(named_by_transformers()),
               "saved": lambda: {saved_by_transformers(k): v for k, v in checkpoints.as_published("F32").items()},
               "prefixed": lambda: {f"model.{k}": v for k, v in checkpoints.as_published("F32").items()}}[way]()
    source = checkpoints.write(tmp_path / "saved", tensors, TRANSFORMERS_CONFIG)
    convert(plan_of(source, "f16"), tmp_path / "m.gguf")
    assert same(arrays(tmp_path / "m.gguf"), arrays(converted(published, "f16")))


def test_the_file_says_what_it_was_made_from(published, converted):
    with GGUF.open(converted(published, "q2")) as file:
        told = {key: file.metadata[f"ds4mlx.{key}"] for key in ("recipe", "checkpoint", "source_fp", "creator")}
    assert told["recipe"] == "q2" and told["checkpoint"] == "V4-0731" and told["creator"].startswith("ds4mlx ")
    assert len(told["source_fp"]) == 64


def test_recipes_of_one_checkpoint_have_one_source(published, converted):
    prints = set()
    for named in ("q2", "q4"):
        with GGUF.open(converted(published, named)) as file:
            prints.add(file.metadata["ds4mlx.source_fp"])
    assert len(prints) == 1


def test_the_source_is_the_same_however_it_is_split(published, plan_of, tmp_path):
    """And an index counts: what it does not name is not read."""
    tensors = checkpoints.as_published()
    halves = [dict(list(tensors.items())[:200]), dict(list(tensors.items())[200:])]
    for i, half in enumerate(halves):
        checkpoints.write(tmp_path / "split", half, file=f"model-{i}.safetensors")
    (tmp_path / "split" / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {name: f"model-{i}.safetensors" for i, half in enumerate(halves) for name in half}}))
    checkpoints.write(tmp_path / "split", {"embed.weight": tensors["embed.weight"]}, file="left-over.safetensors")
    whole, split = (plan_of(source).metadata["ds4mlx.source_fp"] for source in (published, tmp_path / "split"))
    assert whole == split


def test_another_weight_is_another_source(published, plan_of, tmp_path):
    tensors = checkpoints.as_published() | {"norm.weight": checkpoints.stored(np.ones(256), "F32")}
    changed = checkpoints.write(tmp_path / "changed", tensors)
    assert plan_of(changed).metadata["ds4mlx.source_fp"] != plan_of(published).metadata["ds4mlx.source_fp"]


def test_the_vocabulary_comes_with_the_file(published, converted):
    with GGUF.open(converted(published, "q2")) as file:
        assert Tokenizer.from_gguf(file.metadata).vocab_size == CONFIG["vocab_size"]


def test_the_same_bytes_come_out_every_time(published, converted, plan_of, tmp_path):
    convert(plan_of(published, "q4"), tmp_path / "again.gguf", threads=1)
    assert (tmp_path / "again.gguf").read_bytes() == converted(published, "q4").read_bytes()
