"""A tiny random DeepSeek V4: its configuration, weights and prompts, the same on every machine.

Every number is made from SHAKE-128 output by exact integer sums, one float64 product and one float64 sum, so no
library's random generator can change them. Every weight is exact in BF16 and in F16: a file at F16, BF16 or F32 holds
the same model. Needs NumPy only; `make_reference.py` feeds the same weights to another implementation.
"""
import math
from dataclasses import dataclass
from hashlib import shake_128

import numpy as np

SEED = 20261051
PROMPT_LENGTHS = (5, 130, 300, 700)

# Keys as in the published config.json of DeepSeek V4 Flash. Layers are laid out like the first five of Flash. Hidden
# and expert widths are multiples of 256 so that experts can be packed in 256-weight blocks; swiglu_limit is low enough
# to act.
CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "float32",
    "vocab_size": 512, "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "qk_rope_head_dim": 64,
    "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4], "compress_rope_theta": 160000, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 8,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "num_hash_layers": 3,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 1.5, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}

# Sizes of CONFIG under the names used below.
VOCAB, HIDDEN, EXPERT_WIDTH, EXPERTS, CHOSEN, HASH_LAYERS = 512, 256, 256, 8, 3, 3
HEADS, HEAD, Q_RANK, GROUPS, OUT_RANK, STREAMS = 4, 128, 128, 2, 64, 4
INDEX_HEADS, INDEX_HEAD, RATIOS = 16, 128, (0, 0, 4, 128, 4)


@dataclass(frozen=True, slots=True)
class Draw:
    """How one tensor is drawn: bell-shaped around `mean`."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def weights(seed: int = SEED) -> dict[str, np.ndarray]:
    """All tensors under their official names, float32; hash tables (`ffn.gate.tid2eid`) int64. About 0.7 s."""
    made = {name: exact_in_half(draw.mean + draw.std * bell(f"{seed}/{name}", draw.shape)).astype(np.float32)
            for name, draw in draws().items()}
    for layer in range(HASH_LAYERS):
        name = f"layers.{layer}.ffn.gate.tid2eid"
        keys = bits(f"{seed}/{name}", VOCAB * EXPERTS, "<u8").reshape(VOCAB, EXPERTS)
        made[name] = np.argsort(keys, axis=-1, kind="stable")[:, :CHOSEN].astype(np.int64)
    return made


def prompts(seed: int = SEED) -> dict[int, list[int]]:
    """Token ids of each prompt by its length: id 0 (begin of sentence), then ids in 2..511."""
    return {n: [0] + [2 + int(raw) % (VOCAB - 2) for raw in bits(f"{seed}/prompt{n}", n - 1, "<u8")]
            for n in PROMPT_LENGTHS}


def bits(label: str, count: int, dtype: str) -> np.ndarray:
    """`count` uniform unsigned integers of a little-endian dtype, a fixed function of the label."""
    return np.frombuffer(shake_128(label.encode()).digest(count * np.dtype(dtype).itemsize), dtype)


def bell(label: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float64 values of mean 0 and deviation 1: the sum of four 16-bit uniforms, which never exceeds 3.47."""
    pieces = bits(label, 4 * math.prod(shape), "<u2").reshape(-1, 4)
    centred = pieces.sum(axis=-1, dtype=np.int64) - 2 * 65535
    return (centred * (math.sqrt(3.0) / 65536)).reshape(shape)


def exact_in_half(x: np.ndarray) -> np.ndarray:
    """The nearest value with 8 significant bits (BF16) that is a multiple of 2^-24 (the smallest F16 step)."""
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 8, -24))
    return np.rint(x / step) * step


def matrix(rows: int, columns: int, gain: float = 1.0) -> Draw:
    """A linear layer [rows, columns] whose output has about `gain` times the deviation of its input."""
    return Draw((rows, columns), gain / math.sqrt(columns))


def norm(width: int) -> Draw:
    return Draw((width,), 0.15, 1.0)


def draws() -> dict[str, Draw]:
    """Official name -> how to draw it, for every tensor but the hash tables."""
    flat = STREAMS * HIDDEN
    made = {"embed.weight": Draw((VOCAB, HIDDEN), 1.0), "norm.weight": norm(HIDDEN),
            "head.weight": matrix(VOCAB, HIDDEN, 2.0), "hc_head_fn": matrix(STREAMS, flat),
            "hc_head_base": Draw((STREAMS,), 0.6), "hc_head_scale": Draw((1,), 0.15, 0.9)}
    for layer, ratio in enumerate(RATIOS):
        parts = hyper_draws(flat) | attention_draws() | expert_draws(layer)
        if ratio:
            parts |= compressor_draws("attn.compressor", ratio, HEAD, 1.0)
        if ratio == 4:
            parts |= {"attn.indexer.wq_b.weight": matrix(INDEX_HEADS * INDEX_HEAD, Q_RANK, 1.5),
                      "attn.indexer.weights_proj.weight": matrix(INDEX_HEADS, HIDDEN, 1.5)}
            parts |= compressor_draws("attn.indexer.compressor", ratio, INDEX_HEAD, 1.5)
        made |= {f"layers.{layer}.{part}": draw for part, draw in parts.items()}
    return made


def hyper_draws(flat: int) -> dict[str, Draw]:
    mixes = STREAMS * (2 + STREAMS)  # pre, post and the square mixing matrix
    made: dict[str, Draw] = {}
    for place in ("attn", "ffn"):
        made |= {f"hc_{place}_fn": matrix(mixes, flat), f"hc_{place}_base": Draw((mixes,), 0.6),
                 f"hc_{place}_scale": Draw((3,), 0.15, 0.9)}
    return made


def attention_draws() -> dict[str, Draw]:
    return {"attn_norm.weight": norm(HIDDEN), "ffn_norm.weight": norm(HIDDEN),
            "attn.wq_a.weight": matrix(Q_RANK, HIDDEN), "attn.q_norm.weight": norm(Q_RANK),
            "attn.wq_b.weight": matrix(HEADS * HEAD, Q_RANK),
            "attn.wkv.weight": matrix(HEAD, HIDDEN), "attn.kv_norm.weight": norm(HEAD),
            "attn.attn_sink": Draw((HEADS,), 1.0),
            "attn.wo_a.weight": matrix(GROUPS * OUT_RANK, HEADS // GROUPS * HEAD),
            "attn.wo_b.weight": matrix(HIDDEN, GROUPS * OUT_RANK)}


def compressor_draws(place: str, ratio: int, width: int, gain: float) -> dict[str, Draw]:
    columns = width * (2 if ratio == 4 else 1)  # ratio 4 overlaps: a half carried over and a half of its own
    return {f"{place}.wkv.weight": matrix(columns, HIDDEN, gain), f"{place}.wgate.weight": matrix(columns, HIDDEN, 1.5),
            f"{place}.ape": Draw((ratio, columns), 0.7), f"{place}.norm.weight": norm(width)}


def expert_draws(layer: int) -> dict[str, Draw]:
    made = {"ffn.gate.weight": matrix(EXPERTS, HIDDEN, 1.5)}
    if layer >= HASH_LAYERS:
        made["ffn.gate.bias"] = Draw((EXPERTS,), 0.25)
    for place, gain in [("shared_experts", 1.0)] + [(f"experts.{e}", 1.3) for e in range(EXPERTS)]:
        made |= {f"ffn.{place}.w1.weight": matrix(EXPERT_WIDTH, HIDDEN, gain),
                 f"ffn.{place}.w3.weight": matrix(EXPERT_WIDTH, HIDDEN, gain),
                 f"ffn.{place}.w2.weight": matrix(HIDDEN, EXPERT_WIDTH, gain)}
    return made


# Official name within a layer -> GGUF name within a block; routed experts are stacked apart.
GGUF_LAYER = {
    "hc_attn_fn": "hc_attn_fn.weight", "hc_attn_base": "hc_attn_base.weight", "hc_attn_scale": "hc_attn_scale.weight",
    "hc_ffn_fn": "hc_ffn_fn.weight", "hc_ffn_base": "hc_ffn_base.weight", "hc_ffn_scale": "hc_ffn_scale.weight",
    "attn_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight",
    "attn.wq_a.weight": "attn_q_a.weight", "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight", "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight", "attn.attn_sink": "attn_sinks.weight",
    "attn.wo_a.weight": "attn_output_a.weight", "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight", "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight", "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight", "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight", "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight", "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
}
GGUF_TOP = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight",
            "hc_head_fn": "output_hc_fn.weight", "hc_head_base": "output_hc_base.weight",
            "hc_head_scale": "output_hc_scale.weight"}
GGUF_EXPERTS = {"w1": "ffn_gate_exps.weight", "w3": "ffn_up_exps.weight", "w2": "ffn_down_exps.weight"}


def official_to_gguf_arrays(official: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors under their GGUF names, row-major, experts stacked [E, out, in].

    The dtype is the type to write: matrices float16 (exact), vectors float32, hash tables int32.
    """
    made = {GGUF_TOP[name]: array for name, array in official.items() if not name.startswith("layers.")}
    for layer in range(len(RATIOS)):
        prefix, block = f"layers.{layer}.", f"blk.{layer}."
        made |= {block + theirs: official[prefix + ours] for ours, theirs in GGUF_LAYER.items()
                 if prefix + ours in official}
        made |= {block + theirs: np.stack([official[f"{prefix}ffn.experts.{e}.{ours}.weight"] for e in range(EXPERTS)])
                 for ours, theirs in GGUF_EXPERTS.items()}
    return {name: array.astype(gguf_dtype(array)) for name, array in made.items()}


def gguf_dtype(array: np.ndarray) -> type[np.generic]:
    if array.dtype == np.int64:
        return np.int32
    return np.float32 if array.ndim == 1 else np.float16
