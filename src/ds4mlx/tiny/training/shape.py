"""The sizes of the trained model: one layer of each of V4's kinds, enough to copy from far back.

Rows of 256 channels: 192 of them keep no phase of position, so that a compressed row holds the names of its four
tokens and of the four before. Eight heads, so that each slot of a row has one that asks for it.
"""
from collections.abc import Sequence
from dataclasses import replace

from ds4mlx.models.deepseek_v4.config import FLASH, Config

RATIOS = (0, 128, 4)


def shape(vocabulary: int, ratios: Sequence[int] = RATIOS) -> Config:
    """The configuration for a vocabulary of so many ids, with a layer for each of `ratios`."""
    return replace(
        FLASH, vocab_size=vocabulary, hidden_size=256, num_hidden_layers=len(ratios), num_attention_heads=8,
        head_dim=256, qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=64, compress_ratios=tuple(ratios),
        index_n_heads=4, index_head_dim=128, index_topk=128, n_routed_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=256, num_hash_layers=1)
