"""IQ2_XXS: eight weights are a row of a codebook, with signs of which an even number is negative.

w = s row sign, with s = d (2 l + 1) / 8 and a level l of 0 to 15 for 32 weights. The search minimises
sum importance (x - w)^2 = const - 2 s A + s^2 B: for eight weights all rows are tried, since A and B of a row do not
depend on s. An odd number of minus signs costs one wrong sign, where it costs least; A takes that in.
`search.cpp` does the same, faster.
"""
from dataclasses import dataclass

import numpy as np

from ds4mlx.gguf.dequant import IQ2_GRID
from ds4mlx.quant.affine import half

GRID = IQ2_GRID.astype(np.float32)              # [256, 8]
FACTORS = np.geomspace(0.35, 1.3, 7) / 15       # of the weights' spread: scales that a group of 32 is tried at
SHARES = np.linspace(0.75, 1.2, 9)              # of the largest scale, for the highest level: candidates of d
MOST_LEVEL = 15
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Codes:
    """What n blocks hold, before it is packed."""
    d: np.ndarray       # f32 [n], each a half-precision number
    level: np.ndarray   # u8 [n, 8]
    row: np.ndarray     # u8 [n, 8, 4], of the codebook
    sign: np.ndarray    # u8 [n, 8, 4]: bit j is set where weight j of seven is negative


@dataclass(frozen=True, slots=True)
class _Eights:
    """The weights in eights, and what each row of the codebook makes of them."""
    a: np.ndarray       # f32 [n, 8, 4, 256]: sum of importance |x| row, less twice the wrong sign
    b: np.ndarray       # f32 [n, 8, 4, 256]: sum of importance row^2

    def at(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The best rows [n, 8, 4] at scales s [n, 8], and their A and B, summed over each group of 32."""
        row = (s[:, :, None, None] * self.b - 2 * self.a).argmin(axis=-1)
        a, b = (np.take_along_axis(v, row[..., None], -1)[..., 0].sum(-1) for v in (self.a, self.b))
        return row, a, b


def search(x: np.ndarray, importance: np.ndarray) -> Codes:
    """x f32 [n, 256]; importance f32 [m, 256], above 0, repeats after m blocks."""
    importance = np.tile(importance, (len(x) // len(importance), 1))
    x, w = (values.reshape(-1, 8, 4, 8) for values in (x, importance))
    size, odd = w * np.abs(x), (x < 0).sum(axis=-1) % 2 == 1
    wrong = np.where(odd[..., None], (size[..., None, :] * GRID).min(axis=-1), 0)
    eights = _Eights(size @ GRID.T - 2 * wrong, w @ (GRID * GRID).T)
    s, weight = _alone(eights, np.sqrt((size * np.abs(x)).sum((2, 3)) / w.sum((2, 3))))
    d = _unit(s, weight)
    level = _levels(s, d)
    for _ in range(ROUNDS):
        row, a, b = eights.at(d[:, None] * (2 * level + 1) / 8)
        d = _refit(level, a, b)
    return Codes(d, level.astype(np.uint8), row.astype(np.uint8), _signs(x, size, odd, row))


def _alone(eights: _Eights, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best scale of each group of 32 by itself [n, 8], and how much it matters there, B."""
    gain, best, weight = (np.zeros_like(spread) for _ in range(3))
    for factor in FACTORS.astype(np.float32):
        _, a, b = eights.at(spread * factor)
        found = np.where(a > 0, a * a / b, 0)  # what the best scale for these rows, a / b, takes off the error
        better = found > gain
        best, weight = np.where(better, a / b, best), np.where(better, b, weight)
        gain = np.maximum(gain, found)
    return best, weight


def _unit(s: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The d [n] whose levels come nearest to the scales s [n, 8]."""
    top = s.max(axis=1)
    error, best = np.full_like(top, np.inf), np.zeros_like(top)
    for share in SHARES.astype(np.float32):
        d = half(top * share * np.float32(8 / (2 * MOST_LEVEL + 1)))
        found = (weight * (s - d[:, None] * (2 * _levels(s, d) + 1) / 8) ** 2).sum(axis=1)
        best, error = np.where(found < error, d, best), np.minimum(error, found)
    return best


def _levels(s: np.ndarray, d: np.ndarray) -> np.ndarray:
    inverse = np.divide(4, d, out=np.zeros_like(d), where=d > 0)
    return np.rint(np.clip(s * inverse[:, None] - np.float32(0.5), 0, MOST_LEVEL))


def _refit(level: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares for d [n], rows and levels given."""
    m = (2 * level + 1) / 8
    return half(np.maximum((m * a).sum(axis=1), 0) / (m * m * b).sum(axis=1))


def _signs(x: np.ndarray, size: np.ndarray, odd: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Bits of the negative weights, one of them changed where their number is odd. The eighth follows from the rest."""
    negative = x < 0
    cheapest = (size * GRID[row]).argmin(axis=-1)
    negative ^= odd[..., None] & (np.arange(8) == cheapest[..., None])
    return np.packbits(negative, axis=-1, bitorder="little")[..., 0] & 127


def pack(codes: Codes) -> np.ndarray:
    """u8 [n, 66]: d, then for each 32 weights four rows and a word of four sign codes and the level."""
    word = codes.level.astype(np.uint32) << 28
    for lane in range(4):
        word |= codes.sign[:, :, lane].astype(np.uint32) << 7 * lane
    groups = np.concatenate([codes.row, word.astype("<u4")[..., None].view(np.uint8)], axis=-1)
    return np.concatenate([codes.d.astype("<f2").view(np.uint8).reshape(-1, 2), groups.reshape(-1, 64)], axis=1)
