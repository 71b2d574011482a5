"""Configuration from GGUF metadata and from the official config.json."""
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from sparse_model import SMALL

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF
from ds4mlx.gguf.writer import write_gguf
from ds4mlx.models.deepseek_v4.config import FLASH, PRO, Config

OFFICIAL_TINY = json.loads("""{
 "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 512, "hidden_size": 256,
 "moe_intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 1,
 "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "sliding_window": 128,
 "compress_ratios": [0, 0, 4, 128, 4, 0], "compress_rope_theta": 160000, "rope_theta": 10000,
 "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                  "original_max_position_embeddings": 65536},
 "max_position_embeddings": 1048576, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 8,
 "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "num_hash_layers": 3, "norm_topk_prob": true,
 "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "swiglu_limit": 1.5, "hidden_act": "silu",
 "rms_norm_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "num_nextn_predict_layers": 0,
 "tie_word_embeddings": false, "attention_bias": false}""")


def gguf_keys(config=SMALL, **changes):
    """Metadata with some keys under deepseek4. changed; __ in a name is a dot."""
    return config.to_gguf() | {f"deepseek4.{key.replace('__', '.')}": value for key, value in changes.items()}


@pytest.mark.parametrize("config", [SMALL, FLASH, PRO], ids=["small", "flash", "pro"])
def test_metadata_written_to_a_file_reads_as_the_same_model(tmp_path, config):
    """Also where float32 holds a number less exactly than JSON: 1e-6."""
    write_gguf(tmp_path / "m.gguf", config.to_gguf(), [])
    with GGUF.open(tmp_path / "m.gguf") as file:
        assert Config.from_gguf(file.metadata) == config


def test_the_official_config_is_the_same_model_as_its_metadata():
    config = Config.from_official(OFFICIAL_TINY)
    assert Config.from_gguf(config.to_gguf()) == config
    assert (config.compress_ratios, config.rope_factor, config.swiglu_limit) == ((0, 0, 4, 128, 4), 16.0, 1.5)
    assert {type(asdict(config)[field]) for field in ("rope_theta", "rope_beta_fast", "hc_eps")} == {float}


def test_flash_has_21_layers_of_ratio_4_and_20_of_128():
    ratios = FLASH.compress_ratios
    assert (ratios.count(0), ratios.count(4), ratios.count(128)) == (2, 21, 20)
    assert ratios[:2] == (0, 0) and set(ratios[2::2]) == {4} and set(ratios[3::2]) == {128}


def test_pro_has_30_layers_of_ratio_4_and_31_of_128():
    assert (PRO.compress_ratios.count(4), PRO.compress_ratios.count(128)) == (30, 31)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint8])
def test_any_integer_type_and_a_longer_list_of_ratios_are_read(dtype):
    """Published lists have an entry for each draft stage too."""
    assert Config.from_gguf(gguf_keys(attention__compress_ratios=np.array([0, 0, 4, 128, 4, 0, 0], dtype))) == SMALL


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_both_float_types_are_read(dtype):
    assert Config.from_gguf(gguf_keys(swiglu_clamp_exp=np.full(6, 10, dtype), rope__freq_base=10000.0)) == SMALL


@pytest.mark.parametrize("key", sorted(set(SMALL.to_gguf()) - {
    "general.architecture", "deepseek4.context_length", "deepseek4.expert_gating_func", "deepseek4.rope.scaling.type"}))
def test_a_missing_key_is_named(key):
    metadata = SMALL.to_gguf()
    del metadata[key]
    with pytest.raises(ModelFileError, match=f"missing {key}$"):
        Config.from_gguf(metadata)


@pytest.mark.parametrize("key", [
    "num_hidden_layers", "compress_ratios", "rope_scaling", "swiglu_limit", "max_position_embeddings", "hc_eps"])
def test_a_missing_official_key_is_named(key):
    with pytest.raises(ModelFileError, match=f"missing {key}"):
        Config.from_official({k: v for k, v in OFFICIAL_TINY.items() if k != key})


def test_without_a_context_length_it_is_the_stretched_original():
    metadata = SMALL.to_gguf()
    del metadata["deepseek4.context_length"]
    assert Config.from_gguf(metadata).max_position_embeddings == 16 * 65536


@pytest.mark.parametrize("changes, message", [
    (dict(embedding_length=4096.0), "embedding_length is 4096.0, need a whole number"),
    (dict(block_count=True), "block_count is True, need a whole number"),
    (dict(block_count="5"), "block_count is '5', need a whole number"),
    (dict(rope__freq_base=float("nan")), "rope.freq_base is nan, need a finite number"),
    (dict(rope__scaling__factor=float("inf")), "rope.scaling.factor is inf, need a finite number"),
    (dict(rope__freq_base="x" * 10**6), "rope.freq_base is 'xxx"),
    (dict(attention__head_count_kv=2), "head_count_kv is 2, need 1"),
    (dict(attention__value_length=64), "value_length is 64, need 128"),
    (dict(expert_weights_norm=False), "expert_weights_norm is False, need True"),
    (dict(expert_weights_norm=1), "expert_weights_norm is 1, need True"),
    (dict(expert_group_count=8), "expert_group_count is 8, need 0"),
    (dict(expert_gating_func=2), "expert_gating_func is 2, need 4"),
    (dict(rope__scaling__type="linear"), "rope.scaling.type is 'linear', need 'yarn'"),
    (dict(attention__compress_ratios=[0, 0, 4, 64, 4]), "only 0, 4 and 128"),
    (dict(attention__compress_ratios=[0, 0, 4]), r"\[0, 0, 4\] \(3 entries\), need an array of at least 5"),
    (dict(attention__compress_ratios=4), "compress_ratios is 4, need an array"),
    (dict(swiglu_clamp_exp=[10.0, 10.0, 7.0, 10.0, 10.0]), "swiglu_clamp_exp .* need one value for all layers"),
    (dict(swiglu_clamp_exp=[float("nan")] * 5), "swiglu_clamp_exp is nan, need 1e-06 to"),
    (dict(hyper_connection__count=0), "hyper_connection.count is 0, need 1 to 16"),
    (dict(attention__output_group_count=0), "output_group_count is 0, need 1 to"),
    (dict(attention__output_group_count=3), "head_count is 4, need a multiple of the 3 output groups"),
    (dict(expert_used_count=9), "expert_used_count is 9, need at most the 8 experts"),
    (dict(expert_count=64, expert_used_count=64), "expert_used_count is 64, need 1 to 16"),  # it bounds hash tables
    (dict(hash_layer_count=6), "hash_layer_count is 6, need at most the 5 layers"),
    (dict(attention__indexer__key_length=96), "indexer.key_length is 96, need a power of two"),
    (dict(attention__key_length=160, attention__value_length=160), "key_length is 160, need 64 rotary"),
    (dict(embedding_length=250), "embedding_length is 250, need a multiple of 32"),
    (dict(vocab_size=(1 << 64) - 1), "vocab_size is 18446744073709551615, need 1 to 1048576"),
    (dict(block_count=(1 << 64) - 1), "compress_ratios is .*, need an array of at least 18446744073709551615"),
    (dict(rope__scaling__original_context_length=-1), "original_context_length is -1, need 1 to"),
    (dict(rope__scaling__original_context_length=-1 << 63, rope__scaling__factor=1e300), "factor is 1e.300, need 1 to"),
])
def test_what_the_graph_does_not_support_is_refused_by_key(changes, message):
    with pytest.raises(ModelFileError, match=message) as error:
        Config.from_gguf(gguf_keys(**changes))
    assert "deepseek4." in str(error.value) and len(str(error.value)) < 2000 and "\n" not in str(error.value)


@pytest.mark.parametrize("key, value", [
    ("num_key_value_heads", 2), ("scoring_func", "sigmoid"), ("norm_topk_prob", False), ("hidden_act", "gelu"),
    ("attention_bias", True), ("tie_word_embeddings", True), ("rope_theta", 10**400), ("compress_ratios", [[0], 1] * 3),
    ("rope_scaling", {**OFFICIAL_TINY["rope_scaling"], "type": "linear"}), ("rope_scaling", "yarn")])
def test_an_official_value_that_the_graph_does_not_support_is_refused(key, value):
    with pytest.raises(ModelFileError, match=key):
        Config.from_official(OFFICIAL_TINY | {key: value})


def test_all_keys_at_fault_are_reported_together():
    with pytest.raises(ModelFileError, match="embedding_length is 250.*expert_used_count is 9"):
        Config.from_gguf(replace(SMALL, hidden_size=250, num_experts_per_tok=9).to_gguf())
