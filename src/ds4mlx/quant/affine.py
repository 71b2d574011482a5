"""Q2_K and Q4_K: codes on a line, w = d S q - dmin M, with small whole S and M for each run of weights.

The search minimises sum importance (x - w)^2. First each run alone, over many ways to lay its codes; then d and dmin,
then S and M beside them, then d and dmin once more for the codes that this gave. `search.cpp` does the same, faster.
"""
from dataclasses import dataclass

import numpy as np

WEIGHTS = 256                               # of a block
OFFSETS = np.linspace(0.9, -0.9, 8)         # beside the largest code: how far the codes overhang the ends of a run
MARGIN = 1 + 1e-5                           # of an error by which a later one must be better
SHARES = np.linspace(0.85, 1.1, 7)          # of the largest scale, for the largest S or M: candidates of d
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A format of this family."""
    kind: str
    runs: int       # of a block
    most_code: int
    most_scale: int


Q2_K = Line("Q2_K", runs=16, most_code=3, most_scale=15)
Q4_K = Line("Q4_K", runs=8, most_code=15, most_scale=63)


@dataclass(frozen=True, slots=True)
class Codes:
    """What the blocks of a format hold, n blocks, before it is packed."""
    d: np.ndarray       # f32 [n], each a half-precision number
    dmin: np.ndarray    # f32 [n], likewise
    scale: np.ndarray   # u8 [n, runs]
    least: np.ndarray   # u8 [n, runs]
    code: np.ndarray    # u8 [n, 256]


@dataclass(frozen=True, slots=True)
class _Runs:
    """The weights, run by run, and the sums that every fit needs."""
    x: np.ndarray       # f32 [n, runs, weights]
    w: np.ndarray       # f32, importance
    sum_w: np.ndarray   # [n, runs]
    sum_wx: np.ndarray

    def sums(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of w q, w q^2 and w q x."""
        wq = self.w * q
        return wq.sum(-1), (wq * q).sum(-1), (wq * self.x).sum(-1)

    def error(self, a: np.ndarray, m: np.ndarray, sums: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        """sum w (x - a q + m)^2, without the part that does not depend on the codes."""
        q, qq, xq = sums
        return a * a * qq - 2 * a * m * q + m * m * self.sum_w - 2 * a * xq + 2 * m * self.sum_wx


def search(x: np.ndarray, importance: np.ndarray, line: Line) -> Codes:
    """x f32 [n, 256]; importance f32 [m, 256], above 0, repeats after m blocks."""
    importance = np.tile(importance, (len(x) // len(importance), 1))
    x, w = (values.reshape(len(x), line.runs, -1) for values in (x, importance))
    runs = _Runs(x, w, w.sum(-1), (w * x).sum(-1))
    a, m, weight = _alone(runs, line)
    d, dmin = _unit(a, weight, line), _unit(m, runs.sum_w, line)
    scale, least = _whole(a, d, line), _whole(m, dmin, line)
    for _ in range(ROUNDS):
        scale, least = _beside(runs, line, d, dmin, scale, least)
        sums = runs.sums(_codes(runs, line, d[:, None] * scale, dmin[:, None] * least))
        d, dmin = _refit(runs, sums, d, dmin, scale, least)
    code = _codes(runs, line, d[:, None] * scale, dmin[:, None] * least)
    return Codes(d, dmin, *(values.astype(np.uint8) for values in (scale, least, code.reshape(len(x), WEIGHTS))))


def _alone(runs: _Runs, line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best a >= 0 and m >= 0 of each run for x = a q - m, and how much a matters there, sum w q^2."""
    low = np.minimum(runs.x.min(-1), 0)
    width = np.maximum(runs.x.max(-1) - low, np.float32(1e-30))
    error, *best = (np.zeros_like(low) for _ in range(4))  # a = m = 0
    for offset in OFFSETS.astype(np.float32):
        a, m = width / (line.most_code + offset), -low
        for _ in range(2):  # the second time on the line that the first one found
            sums = runs.sums(_codes(runs, line, a, m))
            a, m = _fit(runs, sums)
            found = runs.error(a, m, sums)
            better = found < error * MARGIN  # a lone outlier is any code as well: the largest keeps a, and d, small
            error = np.where(better, found, error)
            best = [np.where(better, new, old) for new, old in zip((a, m, sums[1]), best)]
    return best[0], best[1], best[2]


def _codes(runs: _Runs, line: Line, a: np.ndarray, m: np.ndarray) -> np.ndarray:
    """The nearest codes; 0 where a is 0."""
    inverse = np.divide(1, a, out=np.zeros_like(a), where=a > 1e-30)
    return np.rint(np.clip((runs.x + m[..., None]) * inverse[..., None], 0, line.most_code))


def _fit(runs: _Runs, sums: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Least squares for given codes under a >= 0 and m >= 0."""
    q, qq, xq = sums
    determinant = runs.sum_w * qq - q * q
    solvable = determinant > 1e-6 * runs.sum_w * qq
    safe = np.where(solvable, determinant, 1)
    a, m = (runs.sum_w * xq - q * runs.sum_wx) / safe, (q * xq - qq * runs.sum_wx) / safe
    through_zero = np.where(qq > 0, np.maximum(xq, 0) / np.where(qq > 0, qq, 1), 0)
    constant = np.maximum(-runs.sum_wx / runs.sum_w, 0)
    on_line = solvable & (a > 0) & (m >= 0)
    flat = ~on_line & (through_zero <= 0)
    return np.where(on_line, a, through_zero), np.where(on_line, m, np.where(flat, constant, 0))


def _unit(values: np.ndarray, weight: np.ndarray, line: Line) -> np.ndarray:
    """The d [n] whose multiples come nearest to values [n, runs]."""
    top = values.max(axis=1)
    error, best = np.full_like(top, np.inf), np.zeros_like(top)
    for share in SHARES.astype(np.float32):
        d = half(top / line.most_scale * share)
        found = (weight * (values - _whole(values, d, line) * d[:, None]) ** 2).sum(axis=1)
        best, error = np.where(found < error, d, best), np.minimum(error, found)
    return best


def _whole(values: np.ndarray, d: np.ndarray, line: Line) -> np.ndarray:
    """values / d as whole numbers of the format."""
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    return np.rint(np.clip(values * inverse[:, None], 0, line.most_scale))


def _beside(runs: _Runs, line: Line, d: np.ndarray, dmin: np.ndarray, scale: np.ndarray,
            least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each run the best of S - 1, S and S + 1, each with the M that goes with it."""
    error, best = np.full_like(scale, np.inf), (scale, least)
    for step in (-1, 0, 1):
        tried = np.clip(scale + np.float32(step), 0, line.most_scale)
        a = d[:, None] * tried
        q, _, _ = runs.sums(_codes(runs, line, a, dmin[:, None] * least))
        mins = _whole((a * q - runs.sum_wx) / runs.sum_w, dmin, line)
        m = dmin[:, None] * mins
        found = runs.error(a, m, runs.sums(_codes(runs, line, a, m)))
        best = tuple(np.where(found < error, new, old) for new, old in zip((tried, mins), best))
        error = np.minimum(error, found)
    return best


def _refit(runs: _Runs, sums: tuple[np.ndarray, np.ndarray, np.ndarray], d: np.ndarray, dmin: np.ndarray,
           scale: np.ndarray, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares for d and dmin [n] of all runs together, codes, S and M given; as they were where it has no use."""
    q, qq, xq = sums
    dd, dm, mm = ((scale * scale * qq).sum(1), (scale * least * q).sum(1), (least * least * runs.sum_w).sum(1))
    xd, xm = (scale * xq).sum(1), -(least * runs.sum_wx).sum(1)
    determinant = dd * mm - dm * dm
    solvable = determinant > 1e-6 * dd * mm
    safe = np.where(solvable, determinant, 1)
    new_d = np.where(solvable, (xd * mm + xm * dm) / safe, np.where(mm > 0, d, xd / np.where(dd > 0, dd, 1)))
    new_dmin = np.where(solvable, (xd * dm + xm * dd) / safe, np.where(dd > 0, dmin, xm / np.where(mm > 0, mm, 1)))
    good = (new_d >= 0) & (new_dmin >= 0)
    return half(np.where(good, new_d, d)), half(np.where(good, new_dmin, dmin))


def half(values: np.ndarray) -> np.ndarray:
    """Rounded to half precision, as float32."""
    return values.astype(np.float16).astype(np.float32)


def pack(codes: Codes, line: Line) -> np.ndarray:
    """u8 [n, block bytes]."""
    return _pack_q2_k(codes) if line is Q2_K else _pack_q4_k(codes)


def _pack_q2_k(codes: Codes) -> np.ndarray:
    """Weight 128 a + 32 b + l is two bits of byte 32 a + l, from bit 2 b on."""
    q = codes.code.reshape(-1, 2, 4, 32)
    packed = q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6
    return np.concatenate([codes.scale | codes.least << 4, packed.reshape(-1, 64), _half_bytes(codes.d),
                           _half_bytes(codes.dmin)], axis=1)


def _pack_q4_k(codes: Codes) -> np.ndarray:
    """Weight 64 a + 32 b + l is a nibble of byte 32 a + l; the upper bits of runs 4 to 7 are in the bytes of 0 to 3."""
    q, s, m = codes.code.reshape(-1, 4, 2, 32), codes.scale, codes.least
    packed = q[:, :, 0] | q[:, :, 1] << 4
    low, high = slice(0, 4), slice(4, 8)
    return np.concatenate([
        _half_bytes(codes.d), _half_bytes(codes.dmin), s[:, low] | s[:, high] >> 4 << 6,
        m[:, low] | m[:, high] >> 4 << 6, s[:, high] & 15 | (m[:, high] & 15) << 4, packed.reshape(-1, 128)], axis=1)


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)
