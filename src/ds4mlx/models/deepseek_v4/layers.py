"""The three things every part of the graph needs: a product with file blocks, a norm, and the chunk at hand."""
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import Config


class Linear(nn.Module):
    """y = x W^T with W [out, in] kept in its file's blocks. No bias anywhere in this model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: ops.Blocks | None = None  # set by weights.load

    def __call__(self, x: mx.array, groups: int = 1) -> mx.array:
        return ops.dense_matmul(x, self.weight, groups)


def rms(x: mx.array, eps: float, weight: mx.array | None = None) -> mx.array:
    """x / sqrt(mean(x^2, last axis) + eps), times weight if given."""
    return mx.fast.rms_norm(x, weight, eps)


@dataclass(frozen=True)
class Chunk:
    """T consecutive tokens on their way through the layers: ids i32 [T] at positions start … start + T - 1."""
    config: Config
    ids: mx.array
    start: int

    @property
    def size(self) -> int:
        return self.ids.shape[0]

    @property
    def end(self) -> int:
        return self.start + self.size

    def tables(self, compressed: bool) -> tuple[mx.array, mx.array]:
        """cos and sin of the tokens' positions, [T, pairs], for layers with or without compression."""
        return self._compressed if compressed else self._plain

    @cached_property
    def _plain(self) -> tuple[mx.array, mx.array]:
        return self._tables(False)

    @cached_property
    def _compressed(self) -> tuple[mx.array, mx.array]:
        return self._tables(True)

    def _tables(self, compressed: bool) -> tuple[mx.array, mx.array]:
        cos, sin = rope.tables(np.arange(self.start, self.end), rope.frequencies(self.config, compressed))
        return mx.array(cos), mx.array(sin)
