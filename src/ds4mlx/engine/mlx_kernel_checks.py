"""How an output of a kernel is compared with the reference's: near it, equal to it, or rounded as it is."""
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from ds4mlx.ops.kv_round import FP4_BLOCK, FP8_BLOCK, Packing, fp4_unpack, fp8_unpack

RELATIVE = "of the largest value"
ODD_SHARE = 1e-3    # of codes, and of scales: float32 errors near 1e-6 carry a value over a rounding boundary far rarer


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one output is from what it should be."""
    error: float | None     # None: not finite
    tolerance: float
    unit: str               # of both
    passed: bool
    note: str = ""


class Check(Protocol):
    """`reason` says why the tolerance is what it is."""
    reason: str

    def __call__(self, found: np.ndarray, expected: np.ndarray) -> Difference: ...


@dataclass(frozen=True, slots=True)
class Near:
    """Largest error over the largest value."""
    tolerance: float
    reason: str
    parts: bool = False     # axis 1 holds parts to be added up, which each implementation has its own number of

    def __call__(self, found: np.ndarray, expected: np.ndarray) -> Difference:
        found, expected = (a.astype(np.float64).sum(axis=1) if self.parts else a.astype(np.float64)
                           for a in (found, expected))
        if not np.isfinite(found).all():
            return Difference(None, self.tolerance, RELATIVE, False,
                              f"{np.count_nonzero(~np.isfinite(found))} of {found.size} values are not finite")
        error = np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
        return Difference(float(error), self.tolerance, RELATIVE, bool(error <= self.tolerance))


@dataclass(frozen=True, slots=True)
class Equal:
    """Number of entries that differ: none may."""
    reason: str

    def __call__(self, found: np.ndarray, expected: np.ndarray) -> Difference:
        odd = np.count_nonzero(found != expected)
        return Difference(float(odd), 0.0, "entries", not odd, f"{odd} of {found.size} entries differ" if odd else "")


@dataclass(frozen=True, slots=True)
class Rounded:
    """Largest error of packed rows in steps of their codes. One step is allowed, but only to a few: sums in another
    order may carry a value, or a block's largest and with it the block's scale, over a boundary."""
    packing: Packing
    width: int      # channels of a row
    tail: int       # of them rotary, held as float16 by "fp8"
    reason: str = "a value at a rounding boundary may fall to either side"

    def __call__(self, found: np.ndarray, expected: np.ndarray) -> Difference:
        (values, steps, scale), (right, right_steps, right_scale) = map(self._decoded, (found, expected))
        alike = self._by_channel(scale) == self._by_channel(right_scale)
        # On one grid neighbours are the smaller one's step apart; on two, each is rounded by half a step of its own.
        apart = np.abs(values - right) / np.where(alike, np.minimum(steps, right_steps), np.maximum(steps, right_steps))
        moved, codes = np.count_nonzero(scale != right_scale), np.count_nonzero((apart > 0) & alike)
        few = codes <= 2 + ODD_SHARE * apart.size and moved <= 1 + ODD_SHARE * scale.size
        note = f"{codes} of {apart.size} codes and {moved} of {scale.size} scales differ" if codes or moved else ""
        error = float(apart.max(initial=0))
        return Difference(error, 1.0, "steps", bool(error <= 1 + 1e-6 and few), note)

    def _decoded(self, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values and the distance to their neighbours [..., width], scales [..., blocks], in float64."""
        rows, fp8 = mx.array(packed), self.packing == "fp8"
        values = np.array(fp8_unpack(rows, self.width, self.tail) if fp8 else fp4_unpack(rows, self.width), np.float64)
        first = self.width - self.tail if fp8 else self.width // 2
        count = first // FP8_BLOCK if fp8 else self.width // FP4_BLOCK
        scale = 2.0 ** (packed[..., first:first + count].astype(np.float64) - 127)
        mantissa, least = (3, -6) if fp8 else (1, 0)
        steps = _steps(values, self._by_channel(scale), mantissa, least)
        if fp8:
            steps[..., first:] = _steps(values[..., first:], 1.0, 10, -14)
        return values, steps, scale

    def _by_channel(self, scale: np.ndarray) -> np.ndarray:
        """[..., blocks] to [..., width]; 1 for a tail of float16."""
        wide = np.repeat(scale, FP8_BLOCK if self.packing == "fp8" else FP4_BLOCK, axis=-1)
        return np.concatenate([wide, np.ones((*wide.shape[:-1], self.width - wide.shape[-1]))], axis=-1)


def _steps(values: np.ndarray, scale: np.ndarray | float, mantissa: int, least: int) -> np.ndarray:
    """Between neighbours of a float of so many mantissa bits, whose least exponent is that of its subnormals."""
    exponent = np.floor(np.log2(np.maximum(np.abs(values) / scale, 2.0 ** least)))
    return scale * 2.0 ** (exponent - mantissa)
