"""Mixture of experts: the router, the chosen experts, and the shared expert that every token takes."""
import mlx.core as mx
import mlx.nn as nn

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Batch, Chunk, Linear


class MoE(nn.Module):
    """The first num_hash_layers layers choose experts by token id, the others by score."""

    def __init__(self, config: Config, hashed: bool) -> None:
        super().__init__()
        self.gate = Linear()
        self.gate_bias: mx.array | None = None        # [E]: only selects, never weighs
        self.gate_tid2eid: mx.array | None = None     # i32 [V, experts per token]
        self.experts_w1: ops.Blocks | None = None     # gate [E, F, row bytes]
        self.experts_w3: ops.Blocks | None = None     # up   [E, F, row bytes]
        self.experts_w2: ops.Blocks | None = None     # down [E, D, row bytes]
        self.shared_w1, self.shared_w2, self.shared_w3 = Linear(), Linear(), Linear()
        self.config, self.hashed = config, hashed

    def __call__(self, x: mx.array, tokens: Chunk | Batch) -> mx.array:
        """x [T, D], normalised, to routed + shared [T, D]."""
        selected, weight = self.route(x, tokens.ids)
        mid = ops.expert_gate_up(x, selected, weight, self.experts_w1, self.experts_w3, self.config.swiglu_limit,
                                 shared=(self.shared_w1.weight, self.shared_w3.weight))
        return ops.expert_down(mid, selected, self.experts_w2, shared=self.shared_w2.weight)

    def route(self, x: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Chosen experts i32 [T, S] and their weights f32 [T, S], which sum to routed_scaling_factor."""
        c = self.config
        return ops.route(self.gate(x), self.gate_bias, self.gate_tid2eid, ids, c.num_experts_per_tok,
                         c.routed_scaling_factor)
