"""A random model as small as there can be with every kind of layer, so that thousands of steps take seconds."""
from math import prod

import numpy as np

from ds4mlx.gguf.reader import TensorInfo
from ds4mlx.models.deepseek_v4 import names, weights
from ds4mlx.models.deepseek_v4.config import Config

CONFIG = Config(
    vocab_size=128, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, head_dim=96, qk_rope_head_dim=32,
    q_lora_rank=32, o_groups=1, o_lora_rank=32, sliding_window=16, compress_ratios=(0, 4, 128), index_n_heads=2,
    index_head_dim=32, index_topk=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=32, num_hash_layers=1, routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-6,
    hc_mult=4, hc_sinkhorn_iters=3, hc_eps=1e-6, rope_theta=10000.0, compress_rope_theta=160000.0, rope_factor=16.0,
    rope_beta_fast=32.0, rope_beta_slow=1.0, rope_original_context=65536, max_position_embeddings=1 << 20)


class RandomFile:
    """What `weights.load` asks of a file: bell-shaped weights that keep numbers near 1, and norms of 1."""
    map = None

    def __init__(self, config: Config, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._config = config
        self.tensors = {}
        for name, expected in names.expected_tensors(config).items():
            kind = "I32" if "I32" in expected.kinds else "F32"
            self.tensors[name] = TensorInfo(name, expected.shape, kind, len(self.tensors), prod(expected.shape) * 4)

    def raw(self, name: str) -> np.ndarray:
        shape = self.tensors[name].shape
        if self.tensors[name].kind == "I32":
            experts = self._rng.random((shape[0], self._config.n_routed_experts)).argsort(axis=-1)
            return np.ascontiguousarray(experts[:, :shape[1]], np.int32).view(np.uint8)
        values = self._rng.standard_normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else np.ones(shape)
        return np.ascontiguousarray(values, np.float32).view(np.uint8)


def small_model(rounding="none"):
    return weights.load(RandomFile(CONFIG), CONFIG, rounding)
