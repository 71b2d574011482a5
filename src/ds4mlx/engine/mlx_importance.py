"""What the experts' matrices are multiplied with, summed over prompts: the raw material of an imatrix.

Gate and up read the normalised input of the experts, down the SwiGLU row with its route weight. For each expert, the
squares of every column are summed over the tokens that were routed to it.
"""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.config import Settings
from ds4mlx.engine import mlx_memory
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import names, weights
from ds4mlx.models.deepseek_v4.experts import MoE
from ds4mlx.models.deepseek_v4.layers import Chunk

CHUNK_TOKENS = 512  # at most: logits of a chunk are computed too, and thrown away


@dataclass(frozen=True, slots=True)
class Squares:
    """Of one stack of experts."""
    sums: np.ndarray    # f64 [experts, columns]
    counts: np.ndarray  # i64 [experts], tokens

    @classmethod
    def none(cls, experts: int, columns: int) -> Self:
        return cls(np.zeros((experts, columns)), np.zeros(experts, np.int64))

    def add(self, rows: np.ndarray, experts: np.ndarray) -> None:
        """rows f32 [n, columns], each multiplied with the matrix of its expert, experts i32 [n]."""
        order = np.argsort(experts, kind="stable")
        met, starts, counts = np.unique(experts[order], return_index=True, return_counts=True)
        self.sums[met] += np.add.reduceat(np.square(rows[order], dtype=np.float64), starts, axis=0)
        self.counts[met] += counts


class _Watched:
    """Stands where a layer's experts stood, computes the same and takes down what they read."""

    def __init__(self, experts: MoE, inputs: Squares, middle: Squares) -> None:
        self.experts, self.inputs, self.middle = experts, inputs, middle

    def __call__(self, x: mx.array, chunk: Chunk) -> mx.array:
        e = self.experts
        selected, weight = e.route(x, chunk.ids)
        mid = ops.expert_gate_up(x, selected, weight, e.experts_w1, e.experts_w3, e.config.swiglu_limit,
                                 shared=(e.shared_w1.weight, e.shared_w3.weight))
        chosen, slots = np.array(selected), selected.shape[1]
        self.inputs.add(np.repeat(np.array(x, np.float32), slots, axis=0), chosen.reshape(-1))
        self.middle.add(np.array(mid[:, :slots], np.float32).reshape(chosen.size, -1), chosen.reshape(-1))
        return ops.expert_down(mid, selected, e.experts_w2, shared=e.shared_w2.weight)


def collect(settings: Settings, path: Path, prompts: Iterable[Sequence[int]],
            progress: Callable[[int], None] = lambda tokens: None) -> dict[str, Squares]:
    """The squares by GGUF name, from one forward pass over each prompt's token ids; `progress` hears of each chunk.

    Raises ModelFileError before weights are read, DoesNotFit before they are allocated.
    """
    with GGUF.open(path) as file:
        config = names.validate(file)
        chunk = min(settings.prefill_chunk, CHUNK_TOKENS)
        plan = mlx_memory.plan(file, config, settings.ctx, 1, settings.kv_round == "official", 1, chunk,
                               mlx_memory.limit_bytes(settings.memory_limit_gb))
        mlx_memory.require(plan, settings.ctx)
        ops.use(settings.ops, settings.quality)
        model = weights.load(file, config, settings.kv_round)
        found: dict[str, Squares] = {}
        for i, layer in enumerate(model.layers):
            inputs, middle = (Squares.none(config.n_routed_experts, width)
                              for width in (config.hidden_size, config.moe_intermediate_size))
            found |= {f"blk.{i}.ffn_gate_exps.weight": inputs, f"blk.{i}.ffn_up_exps.weight": inputs,
                      f"blk.{i}.ffn_down_exps.weight": middle}
            layer.ffn = _Watched(layer.ffn, inputs, middle)
        for ids in prompts:
            cache = model.make_cache(len(ids))
            for start in range(0, len(ids), chunk):
                tokens = ids[start:start + chunk]
                model(mx.array([tokens], mx.int32), cache=cache)
                progress(len(tokens))
        return found
