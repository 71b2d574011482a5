"""Tokens to compressed rows, and the frontier between them: the tokens of the group that is still open."""
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.layers import Chunk, Linear, rms
from ds4mlx.models.deepseek_v4.state import CompressorState


class Compressor(nn.Module):
    """One row for every `ratio` tokens.

    Ratio 128 pools the 128 tokens of a group. Ratio 4 overlaps: k and s are twice as wide, and a row pools the carry
    halves ([:w]) of the group before with the own halves ([w:]) of its own group, in one softmax per channel.
    """

    def __init__(self, config: Config, ratio: int, width: int, rounding: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.wkv, self.wgate = Linear(), Linear()
        self.ape: mx.array | None = None    # [ratio, w or 2w], added to the score of the token's place in its group
        self.norm: mx.array | None = None
        self.ratio, self.width, self.overlap = ratio, width, ratio == 4
        self.rounding, self.eps = rounding, config.rms_norm_eps
        self.frequencies = rope.frequencies(config, compressed=True)

    def __call__(self, x: mx.array, chunk: Chunk, state: CompressorState) -> None:
        """Append the rows that x [T, D] completes to state.rows and leave the rest in state.k, state.s."""
        r = self.ratio
        place = mx.array(np.arange(chunk.start, chunk.end) % r)
        k = mx.concatenate([state.k, self.wkv(x)])
        s = mx.concatenate([state.s, self.wgate(x) + self.ape[place]])
        before = r if self.overlap and chunk.start >= r else 0   # tokens of the previous group held for their carry
        groups = (chunk.start % r + chunk.size) // r
        if groups:
            first = chunk.start // r
            state.rows.append(self._rows(k, s, before, groups, first))
        done = before + groups * r
        keep = done - (r if self.overlap and done else 0)
        state.k, state.s = mx.contiguous(k[keep:]), mx.contiguous(s[keep:])

    def _rows(self, k: mx.array, s: mx.array, before: int, groups: int, first: int) -> mx.array:
        """Rows first … first + groups - 1, [groups, width]; the group's first token is at index `before` of k."""
        pooled = ops.compress(self._slots(k, before, groups, 0.0), self._slots(s, before, groups, -mx.inf))
        row = rms(pooled, self.eps, self.norm)
        cos, sin = rope.tables(np.arange(first, first + groups) * self.ratio, self.frequencies)
        return self.rounding(ops.rope_tail(row, mx.array(cos), mx.array(sin)))

    def _slots(self, a: mx.array, before: int, groups: int, empty: float) -> mx.array:
        """The vectors that each group pools, [groups, ratio or 2 ratio, width]; `empty` where no group is before."""
        r, w = self.ratio, self.width
        own = a[before:before + groups * r].reshape(groups, r, -1)
        if not self.overlap:
            return own
        previous = a[:r, :w] if before else mx.full((r, w), empty)
        carry = mx.concatenate([previous[None], own[:-1, :, :w]])
        return mx.concatenate([carry, own[..., w:]], axis=1)
