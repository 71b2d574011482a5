"""Sizes, layer pattern and rope of a DeepSeek V4 model. Tiny, Flash and PRO are values of one class.

Read from GGUF metadata or from the official config.json; the fields have the official names. A value that the graph
does not support is refused here, so the code behind it only asserts.
"""
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Self

import numpy as np

from ds4mlx.errors import ModelFileError

ARCHITECTURE = "deepseek4"


@dataclass(frozen=True, slots=True)
class Config:
    """One model. Building one does not check it; `from_gguf`, `from_official` and `problems` do."""
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int                       # plain channels, then the rotary ones
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int                    # per group
    sliding_window: int                 # tokens, the query's own included
    compress_ratios: tuple[int, ...]    # per layer: 0 window only, 4 with indexer, 128
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    num_hash_layers: int                # leading layers that route by token id
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int                        # residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    rope_theta: float                   # layers of ratio 0
    compress_rope_theta: float          # all others, with the YaRN numbers below
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_context: int          # tokens
    max_position_embeddings: int        # tokens

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """The model that GGUF metadata describes. Raises ModelFileError naming every key at fault."""
        source = _Source(metadata, prefix=f"{ARCHITECTURE}.")
        values = {field: source.whole(key) for field, key in GGUF_INTS.items()}
        values |= {field: source.number(key) for field, key in GGUF_FLOATS.items()}
        values["compress_ratios"] = source.ratios("attention.compress_ratios", values["num_hidden_layers"])
        values["swiglu_limit"] = source.one_limit("swiglu_clamp_exp", values["num_hidden_layers"])
        stretched = int(min(max(values["rope_original_context"] * values["rope_factor"], 0), 1 << 62))
        values["max_position_embeddings"] = source.whole("context_length", default=stretched)
        source.same("attention.head_count_kv", source.whole("attention.head_count_kv"), 1)
        source.same("attention.value_length", source.whole("attention.value_length"), values["head_dim"])
        source.flag("expert_weights_norm", True)
        for key, only in (("expert_group_count", 0), ("expert_group_used_count", 0), ("expert_gating_func", 4),
                          ("rope.scaling.type", "yarn")):
            source.same(key, source.get(key, only), only)
        return _checked(cls(**values), source, GGUF_KEYS)

    @classmethod
    def from_official(cls, config: Mapping[str, object]) -> Self:
        """The model that an official config.json describes. Raises ModelFileError naming every key at fault."""
        scaling = config.get("rope_scaling")
        source = _Source(dict(config) | {f"rope_scaling.{key}": value for key, value in scaling.items()}
                         if isinstance(scaling, Mapping) else config, prefix="")
        values = {field: source.whole(OFFICIAL_KEYS.get(field, field)) for field in GGUF_INTS}
        values |= {field: source.number(OFFICIAL_KEYS.get(field, field)) for field in GGUF_FLOATS}
        values["compress_ratios"] = source.ratios("compress_ratios", values["num_hidden_layers"])
        values["swiglu_limit"] = source.number("swiglu_limit")
        values["max_position_embeddings"] = source.whole("max_position_embeddings")
        for key, only in (("num_key_value_heads", 1), ("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True),
                          ("hidden_act", "silu"), ("attention_bias", False), ("tie_word_embeddings", False),
                          ("rope_scaling.type", "yarn")):
            source.same(key, source.get(key, only), only)
        return _checked(cls(**values), source, OFFICIAL_KEYS)

    def to_gguf(self) -> dict[str, int | float | bool | str | list[int] | list[float]]:
        """The metadata that `from_gguf` reads, for writing a file."""
        values = asdict(self)
        keys = {key: values[field] for field, key in (GGUF_INTS | GGUF_FLOATS).items()} | {
            "context_length": self.max_position_embeddings,
            "attention.head_count_kv": 1,
            "attention.value_length": self.head_dim,
            "attention.compress_ratios": list(self.compress_ratios),
            "swiglu_clamp_exp": [self.swiglu_limit] * self.num_hidden_layers,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
            "rope.scaling.type": "yarn",
        }
        return {"general.architecture": ARCHITECTURE} | {f"{ARCHITECTURE}.{key}": keys[key] for key in keys}

    def problems(self) -> Iterator[tuple[str, object, str]]:
        """(field, found, needed) for everything that the graph does not support."""
        outside = [field for field, (low, high) in LIMITS.items() if not low <= getattr(self, field) <= high]
        for field in outside:
            yield field, getattr(self, field), "{} to {}".format(*LIMITS[field])
        if not outside:
            yield from self._mismatches()

    def _mismatches(self) -> Iterator[tuple[str, object, str]]:
        for field in ("hidden_size", "moe_intermediate_size", "q_lora_rank"):
            if getattr(self, field) % 32:
                yield field, getattr(self, field), "a multiple of 32"
        if len(self.compress_ratios) != self.num_hidden_layers:
            yield "compress_ratios", list(self.compress_ratios), f"{self.num_hidden_layers} entries"
        if any(ratio not in (0, 4, 128) for ratio in self.compress_ratios):
            yield "compress_ratios", list(self.compress_ratios), "only 0, 4 and 128"
        plain = self.head_dim - self.qk_rope_head_dim
        if plain <= 0 or plain % 64:
            yield "head_dim", self.head_dim, f"{self.qk_rope_head_dim} rotary channels and a multiple of 64 others"
        if self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", self.qk_rope_head_dim, "an even number"
        if self.index_head_dim & (self.index_head_dim - 1) or self.index_head_dim < self.qk_rope_head_dim:
            yield "index_head_dim", self.index_head_dim, f"a power of two, at least {self.qk_rope_head_dim}"
        if self.num_attention_heads % self.o_groups:
            yield "num_attention_heads", self.num_attention_heads, f"a multiple of the {self.o_groups} output groups"
        if self.o_groups * self.o_lora_rank % 32:
            yield "o_lora_rank", self.o_lora_rank, f"a multiple of 32 over {self.o_groups} groups"
        if self.num_experts_per_tok > self.n_routed_experts:
            yield "num_experts_per_tok", self.num_experts_per_tok, f"at most the {self.n_routed_experts} experts"
        if self.num_hash_layers > self.num_hidden_layers:
            yield "num_hash_layers", self.num_hash_layers, f"at most the {self.num_hidden_layers} layers"
        if self.rope_beta_fast <= self.rope_beta_slow:
            yield "rope_beta_fast", self.rope_beta_fast, f"more than rope_beta_slow, {self.rope_beta_slow}"


MAX_REPORTED = 8
# Bounds of the graph, or simply far above any model, so that products of sizes stay small integers.
LIMITS: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 1 << 20), "hidden_size": (32, 1 << 16), "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 1024), "head_dim": (66, 4096), "qk_rope_head_dim": (2, 1024),
    "q_lora_rank": (32, 1 << 16), "o_groups": (1, 1024), "o_lora_rank": (1, 1 << 16), "sliding_window": (1, 1 << 16),
    "index_n_heads": (1, 1024), "index_head_dim": (32, 1024), "index_topk": (1, 1 << 16),
    "n_routed_experts": (1, 1 << 14), "num_experts_per_tok": (1, 16), "n_shared_experts": (1, 1),
    "moe_intermediate_size": (32, 1 << 16), "num_hash_layers": (0, 16), "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6), "rms_norm_eps": (1e-12, 1e-2), "hc_mult": (1, 16), "hc_sinkhorn_iters": (1, 1000),
    "hc_eps": (1e-12, 1e-2), "rope_theta": (2, 1e12), "compress_rope_theta": (2, 1e12), "rope_factor": (1, 1e6),
    "rope_beta_fast": (1e-6, 1e6), "rope_beta_slow": (1e-6, 1e6), "rope_original_context": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 24),
}
GGUF_INTS: dict[str, str] = {
    "vocab_size": "vocab_size", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "head_dim": "attention.key_length",
    "qk_rope_head_dim": "rope.dimension_count", "q_lora_rank": "attention.q_lora_rank",
    "o_groups": "attention.output_group_count", "o_lora_rank": "attention.output_lora_rank",
    "sliding_window": "attention.sliding_window", "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length", "index_topk": "attention.indexer.top_k",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count", "moe_intermediate_size": "expert_feed_forward_length",
    "num_hash_layers": "hash_layer_count", "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "rope_original_context": "rope.scaling.original_context_length",
}
GGUF_FLOATS: dict[str, str] = {
    "routed_scaling_factor": "expert_weights_scale", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "hc_eps": "hyper_connection.epsilon", "rope_theta": "rope.freq_base",
    "compress_rope_theta": "attention.compress_rope_freq_base", "rope_factor": "rope.scaling.factor",
    "rope_beta_fast": "rope.scaling.yarn_beta_fast", "rope_beta_slow": "rope.scaling.yarn_beta_slow",
}
GGUF_KEYS: dict[str, str] = GGUF_INTS | GGUF_FLOATS | {
    "compress_ratios": "attention.compress_ratios", "swiglu_limit": "swiglu_clamp_exp",
    "max_position_embeddings": "context_length",
}
OFFICIAL_KEYS: dict[str, str] = {  # where they differ from the fields
    "rope_factor": "rope_scaling.factor", "rope_beta_fast": "rope_scaling.beta_fast",
    "rope_beta_slow": "rope_scaling.beta_slow",
    "rope_original_context": "rope_scaling.original_max_position_embeddings",
}


class _Source:
    """Metadata being read: hands out values of the right type and collects what is wrong, to report it in one go."""

    __slots__ = ("values", "prefix", "wrong", "missing")

    def __init__(self, values: Mapping[str, object], prefix: str) -> None:
        self.values, self.prefix = values, prefix
        self.wrong: list[str] = []
        self.missing: list[str] = []

    @property
    def report(self) -> str:
        """Empty if all is well."""
        if self.missing:  # then others may look wrong that are not
            return f"missing {', '.join(self.missing[:MAX_REPORTED])}"
        return "; ".join(self.wrong[:MAX_REPORTED])

    def get(self, key: str, default: object) -> object:
        return self.values.get(self.prefix + key, default)

    def refuse(self, key: str, found: object, needed: str) -> None:
        if found is None:
            self.missing.append(self.prefix + key)
        else:
            self.wrong.append(f"{self.prefix}{key} is {shown(found)}, need {needed}")

    def same(self, key: str, found: object, only: object) -> None:
        if type(found) is not type(only) or found != only:
            self.refuse(key, found, f"{shown(only)}")

    def flag(self, key: str, only: bool) -> None:
        self.same(key, self.get(key, None), only)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is int:
            return value
        self.refuse(key, value, "a whole number")
        return 1

    def number(self, key: str) -> float:
        """A finite float. Whole numbers pass: JSON does not tell them apart."""
        value = self.get(key, None)
        if type(value) is int and abs(value) < 1 << 63:
            return float(value)
        if type(value) is float and math.isfinite(value):
            return _plain(value)
        self.refuse(key, value, "a finite number")
        return 1.0

    def array(self, key: str, layers: int, of: type[int] | type[float]) -> list[int] | list[float]:
        """The entries of the first `layers` layers; published lists are longer, for the draft stages."""
        value = self.get(key, None)
        if isinstance(value, np.ndarray | list) and 0 < layers <= min(len(value), LIMITS["num_hidden_layers"][1]):
            entries = value[:layers].tolist() if isinstance(value, np.ndarray) else value[:layers]
            if all(type(entry) is of for entry in entries):
                return entries
        self.refuse(key, value, f"an array of at least {layers} {of.__name__} values")
        return []

    def ratios(self, key: str, layers: int) -> tuple[int, ...]:
        return tuple(self.array(key, layers, int))

    def one_limit(self, key: str, layers: int) -> float:
        """An array of one value per layer that must all be equal."""
        limits = self.array(key, layers, float)
        if len(set(limits)) > 1:
            self.refuse(key, limits, "one value for all layers")
        return _plain(limits[0]) if limits else 1.0


def _plain(value: float) -> float:
    """1e-6 stored as float32 reads 9.99999997e-07: the shortest decimal of the same float32 is what was meant."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def shown(value: object) -> str:
    """A value of metadata, for an error: short, on one line, and harmless to a terminal."""
    if isinstance(value, np.ndarray | list | tuple):
        head = value[:4].tolist() if isinstance(value, np.ndarray) else value[:4]
        entries = ", ".join(repr(entry)[:20] for entry in head)
        return f"[{entries}{', ...' if len(value) > 4 else ''}] ({len(value)} entries)"
    return repr(value[:80] if isinstance(value, str) else value)[:80]


def _checked(config: Config, source: _Source, keys: Mapping[str, str]) -> Config:
    if not source.report:
        for field, found, needed in config.problems():
            source.refuse(keys.get(field, field), found, needed)
    if source.report:
        raise ModelFileError(f"not a model that this engine runs: {source.report}")
    return config


def _pattern(first: int, layers: int) -> tuple[int, ...]:
    return (first, first, *(4 if layer % 2 == 0 else 128 for layer in range(2, layers)))


FLASH = Config(
    vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, head_dim=512,
    qk_rope_head_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, sliding_window=128,
    compress_ratios=_pattern(0, 43), index_n_heads=64, index_head_dim=128, index_topk=512, n_routed_experts=256,
    num_experts_per_tok=6, n_shared_experts=1, moe_intermediate_size=2048, num_hash_layers=3,
    routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    rope_theta=10000.0, compress_rope_theta=160000.0, rope_factor=16.0, rope_beta_fast=32.0, rope_beta_slow=1.0,
    rope_original_context=65536, max_position_embeddings=1048576)
PRO = replace(
    FLASH, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536, o_groups=16,
    compress_ratios=_pattern(128, 61), index_topk=1024, n_routed_experts=384, moe_intermediate_size=3072,
    routed_scaling_factor=2.5)
