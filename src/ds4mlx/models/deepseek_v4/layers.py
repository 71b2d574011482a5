"""The two things every part of the graph needs: a product with file blocks, and the chunk at hand."""
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Chunk:
    """T consecutive tokens on their way through the layers: ids i32 [T] at positions start … start + T - 1."""
    config: Config
    ids: mx.array
    start: int
    _groups: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict, repr=False)

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
        return self._tables(np.arange(self.start, self.end), False)

    @cached_property
    def _compressed(self) -> tuple[mx.array, mx.array]:
        return self._tables(np.arange(self.start, self.end), True)

    def group_tables(self, ratio: int) -> tuple[mx.array, mx.array]:
        """The same of the first positions of the groups of `ratio` tokens that the chunk completes."""
        if ratio not in self._groups:
            groups = np.arange(self.start // ratio, self.end // ratio)
            self._groups[ratio] = self._tables(groups * ratio, True)
        return self._groups[ratio]

    def _tables(self, positions: np.ndarray, compressed: bool) -> tuple[mx.array, mx.array]:
        cos, sin = rope.tables(positions, rope.frequencies(self.config, compressed))
        return mx.array(cos), mx.array(sin)
