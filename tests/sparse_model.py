"""Model files without weights: the right keys, names, shapes and types over a hole."""
from dataclasses import replace

import numpy as np

from ds4mlx.gguf.writer import write_gguf
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.models.deepseek_v4.names import expected_tensors
from ds4mlx.text.segments import CONTROL_LITERALS

SMALL = replace(
    FLASH, vocab_size=64, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, head_dim=128, q_lora_rank=64,
    o_groups=2, o_lora_rank=32, compress_ratios=(0, 0, 4, 128, 4), index_n_heads=2, index_topk=8, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=256)


def metadata_of(config):
    tokens = [*CONTROL_LITERALS, *(f"token{i}" for i in range(config.vocab_size - len(CONTROL_LITERALS)))]
    return config.to_gguf() | {
        "general.name": "a model", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t o"]}


def tensors_of(config):
    """GGUF name -> (kind, shape, data) in the types of the published q2 file; zeros but for the expert tables."""
    table = np.tile(np.arange(config.num_experts_per_tok, dtype=np.int32), (config.vocab_size, 1))
    return {name: (_kind(need), need.shape, table.copy() if need.kinds == ("I32",) else None)
            for name, need in expected_tensors(config).items()}


def _kind(need):
    if ".experts_" not in need.path:
        return need.kinds[0]
    return "Q2_K" if need.path.endswith("w2") else "IQ2_XXS"


def write_model(path, metadata, tensors):
    write_gguf(path, metadata, [(name, *entry) for name, entry in tensors.items()])
    return path
