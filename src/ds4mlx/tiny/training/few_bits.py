"""What the q2 recipe makes of expert matrices, while they are trained: IQ2_XXS for gate and up, Q2_K for down.

The searches are those of `quant.codebook` and `quant.affine`, on tensors and without the packing, so that weights get
used to the very numbers that the file will hold. What columns count is what the layers have seen of late: see
`experts.Seen`.
"""
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from ds4mlx.gguf.dequant import IQ2_GRID
from ds4mlx.quant import affine, codebook
from ds4mlx.quant.encode import SHRINKAGE
from ds4mlx.quant.importance import Entry, Importance
from ds4mlx.tiny.training.model import Model

LINE = affine.Q2_K


@torch.no_grad()
def round_experts(model: Model) -> None:
    """Set what the experts' weights lose, which their layers then add to them."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")       # codes are chosen by small differences
    try:
        _round_experts(model)
    finally:
        torch.set_float32_matmul_precision(precision)


def _round_experts(model: Model) -> None:
    layers = [layer.ffn for layer in model.layers]
    for ffn in layers:
        for name in ("experts_w1", "experts_w3"):
            weight = getattr(ffn, name)
            getattr(ffn, f"{name}_error").copy_(iq2_xxs(weight, ffn.seen.inputs()) - weight)
    down = torch.stack([ffn.experts_w2 for ffn in layers])      # together: many small steps
    lost = q2_k(down, torch.stack([ffn.seen.middle() for ffn in layers])) - down
    for ffn, error in zip(layers, lost, strict=True):
        ffn.experts_w2_error.copy_(error)


def imatrix(model: Model, path: Path, steps: int) -> Importance:
    """What the layers have seen of late, for the quantiser: the importance that the experts are rounded by."""
    entries = {}
    for i, layer in enumerate(model.layers):
        share, inputs, middle = (held.cpu().numpy() for held in layer.ffn.seen.buffers())
        entries |= {f"blk.{i}.ffn_gate_exps.weight": Entry(inputs, share),
                    f"blk.{i}.ffn_up_exps.weight": Entry(inputs, share),
                    f"blk.{i}.ffn_down_exps.weight": Entry(middle, share)}
    return Importance(path, entries, "lessons, while they were learned", steps)


def smoothed(importance: Tensor) -> Tensor:
    """importance [..., columns] over its mean and a tenth for every column, as the quantiser takes it."""
    mean = importance.mean(-1, keepdim=True)
    return torch.where(mean > 0, importance / mean.clamp(min=1e-30), 1.0) + SHRINKAGE


def iq2_xxs(w: Tensor, importance: Tensor) -> Tensor:
    """w [..., rows, columns] by a grid of 256 vectors of 8 sizes; signs of which an even number is negative; a level of
    4 bits for each 32 weights and a unit for 256. importance [..., columns]; where all of it is 0, nothing is known."""
    x, counts = _blocks(w, importance, (8, 4, 8))
    eights = _Eights(x, counts)
    s, weight = _alone(eights, ((counts * x.square()).sum((2, 3)) / counts.sum((2, 3))).sqrt())
    d = _nearest_unit(s, weight, [8 / (2 * codebook.MOST_LEVEL + 1) * share for share in codebook.SHARES], _grid_scale)
    level = _level(s, d)
    for _ in range(codebook.ROUNDS):
        row, a, b = eights.at(d * level)
        d = ((level * a).sum(1, keepdim=True).clamp(min=0) / (level.square() * b).sum(1, keepdim=True)).half().float()
    return (d * level)[..., None, None].mul(eights.signed(row)).reshape(w.shape)


class _Eights:
    """Weights x [n, 8, 4, 8] in eights, and what each row of the grid makes of them, as in `quant.codebook`."""

    def __init__(self, x: Tensor, counts: Tensor) -> None:
        self.grid = torch.as_tensor(IQ2_GRID, dtype=torch.float32, device=x.device)
        self.x, self.size, self.odd = x, counts * x.abs(), (x < 0).sum(-1) % 2 == 1
        wrong = self.size[..., :1] * self.grid[:, 0]
        for lane in range(1, 8):
            torch.minimum(wrong, self.size[..., lane:lane + 1] * self.grid[:, lane], out=wrong)
        self.a = (self.size @ self.grid.T).sub_(wrong.mul_(2 * self.odd[..., None]))    # [n, 8, 4, 256]
        self.b = counts @ self.grid.square().T

    def at(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best rows [n, 8, 4] at scales s [n, 8], and their A and B, summed over each group of 32."""
        row = torch.addcmul(-2 * self.a, s[:, :, None, None], self.b).argmin(-1)
        a, b = (v.gather(-1, row[..., None])[..., 0].sum(-1) for v in (self.a, self.b))
        return row, a, b

    def signed(self, row: Tensor) -> Tensor:
        """Vectors of the grid with the signs of the weights, an odd number of them mended where it costs least."""
        vector = self.grid[row]
        mended = self.odd[..., None] & (torch.arange(8, device=row.device)
                                        == (self.size * vector).argmin(-1, keepdim=True))
        return torch.where((self.x < 0) ^ mended, -vector, vector)


def _alone(eights: _Eights, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The best scale of each group of 32 by itself [n, 8], and how much it matters there."""
    gain, best, weight = (torch.zeros_like(spread) for _ in range(3))
    for factor in codebook.FACTORS:
        _, a, b = eights.at(spread * float(factor))
        found = torch.where(a > 0, a.square() / b, 0.0)
        best, weight = torch.where(found > gain, a / b, best), torch.where(found > gain, b, weight)
        gain = torch.maximum(gain, found)
    return best, weight


def _level(s: Tensor, d: Tensor) -> Tensor:
    """What the levels nearest to s / d are worth: odd eighths."""
    return (2 * (4 * s / d.clamp(min=1e-12) - 0.5).clamp(0, codebook.MOST_LEVEL).round() + 1) / 8


def _grid_scale(s: Tensor, d: Tensor) -> Tensor:
    return d * _level(s, d)


def q2_k(w: Tensor, importance: Tensor) -> Tensor:
    """w [..., rows, columns] as scale * (0 … 3) - least, each of 4 bits for each 16 weights, and a unit of both for
    256. importance as for `iq2_xxs`."""
    runs = _Runs(*_blocks(w, importance, (16, 16)))
    a, m, weight = _lines(runs)
    shares = [share / LINE.most_scale for share in affine.SHARES]
    d, dmin = (_nearest_unit(v, by, shares, lambda v, d: d * _whole(v, d)) for v, by in ((a, weight), (m, runs.sum_w)))
    scale, least = _whole(a, d), _whole(m, dmin)
    for _ in range(affine.ROUNDS):
        scale, least = _beside(runs, d, dmin, scale, least)
        d, dmin = _refit(runs, runs.sums(runs.codes(d * scale, dmin * least)), d, dmin, scale, least)
    a, m = (d * scale)[..., None], (dmin * least)[..., None]
    return (a * runs.codes(d * scale, dmin * least) - m).reshape(w.shape)


class _Runs:
    """Weights x [n, 16, 16] run by run, and the sums that every fit needs, as in `quant.affine`."""

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.x, self.w, self.sum_w, self.sum_wx = x, w, w.sum(-1), (w * x).sum(-1)

    def sums(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of w q, w q^2 and w q x."""
        wq = self.w * q
        return wq.sum(-1), (wq * q).sum(-1), (wq * self.x).sum(-1)

    def error(self, a: Tensor, m: Tensor, sums: Iterable[Tensor]) -> Tensor:
        """sum w (x - a q + m)^2, without the part that does not depend on the codes."""
        q, qq, xq = sums
        return a * a * qq - 2 * a * m * q + m * m * self.sum_w - 2 * a * xq + 2 * m * self.sum_wx

    def codes(self, a: Tensor, m: Tensor) -> Tensor:
        """The nearest codes; 0 where a is 0."""
        inverse = torch.where(a > 1e-30, 1 / a.clamp(min=1e-30), 0.0)
        return ((self.x + m[..., None]) * inverse[..., None]).clamp(0, LINE.most_code).round()


def _lines(runs: _Runs) -> tuple[Tensor, Tensor, Tensor]:
    """The best a >= 0 and m >= 0 of each run by itself for x = a q - m, and how much a matters there."""
    low = runs.x.amin(-1).clamp(max=0)
    width = (runs.x.amax(-1) - low).clamp(min=1e-30)
    error, best_a, best_m, weight = (torch.zeros_like(low) for _ in range(4))
    for offset in affine.OFFSETS:
        a, m = width / (LINE.most_code + float(offset)), -low
        for _ in range(2):
            sums = runs.sums(runs.codes(a, m))
            a, m = _fit(runs, sums)
            found = runs.error(a, m, sums)
            better = found < error * affine.MARGIN
            error = torch.where(better, found, error)
            best_a, best_m, weight = (torch.where(better, new, old)
                                      for new, old in ((a, best_a), (m, best_m), (sums[1], weight)))
    return best_a, best_m, weight


def _fit(runs: _Runs, sums: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Least squares for given codes under a >= 0 and m >= 0."""
    q, qq, xq = sums
    determinant = runs.sum_w * qq - q * q
    solvable = determinant > 1e-6 * runs.sum_w * qq
    safe = torch.where(solvable, determinant, 1.0)
    a, m = (runs.sum_w * xq - q * runs.sum_wx) / safe, (q * xq - qq * runs.sum_wx) / safe
    through_zero = torch.where(qq > 0, xq.clamp(min=0) / torch.where(qq > 0, qq, 1.0), 0.0)
    constant = (-runs.sum_wx / runs.sum_w).clamp(min=0)
    on_line = solvable & (a > 0) & (m >= 0)
    flat = ~on_line & (through_zero <= 0)
    return torch.where(on_line, a, through_zero), torch.where(on_line, m, torch.where(flat, constant, 0.0))


def _whole(values: Tensor, d: Tensor) -> Tensor:
    """values / d as whole numbers of the format."""
    return torch.where(d > 0, values / d.clamp(min=1e-30), 0.0).clamp(0, LINE.most_scale).round()


def _beside(runs: _Runs, d: Tensor, dmin: Tensor, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """For each run the best of scale - 1, scale and scale + 1, each with the least that goes with it."""
    error, best = torch.full_like(scale, torch.inf), (scale, least)
    for step in (-1, 0, 1):
        tried = (scale + step).clamp(0, LINE.most_scale)
        a = d * tried
        q, _, _ = runs.sums(runs.codes(a, dmin * least))
        mins = _whole((a * q - runs.sum_wx) / runs.sum_w, dmin)
        m = dmin * mins
        found = runs.error(a, m, runs.sums(runs.codes(a, m)))
        best = tuple(torch.where(found < error, new, old) for new, old in zip((tried, mins), best, strict=True))
        error = torch.minimum(error, found)
    return best


def _refit(runs: _Runs, sums: tuple[Tensor, Tensor, Tensor], d: Tensor, dmin: Tensor, scale: Tensor,
           least: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares for the units [n, 1], codes, scales and leasts given; as they were where it has no use."""
    q, qq, xq = sums
    dd, dm, mm, xd, xm = (v.sum(1, keepdim=True) for v in (
        scale * scale * qq, scale * least * q, least * least * runs.sum_w, scale * xq, -least * runs.sum_wx))
    determinant = dd * mm - dm * dm
    solvable = determinant > 1e-6 * dd * mm
    safe = torch.where(solvable, determinant, 1.0)
    new_d = torch.where(solvable, (xd * mm + xm * dm) / safe,
                        torch.where(mm > 0, d, xd / torch.where(dd > 0, dd, 1.0)))
    new_dmin = torch.where(solvable, (xd * dm + xm * dd) / safe,
                           torch.where(dd > 0, dmin, xm / torch.where(mm > 0, mm, 1.0)))
    good = (new_d >= 0) & (new_dmin >= 0)
    return torch.where(good, new_d, d).half().float(), torch.where(good, new_dmin, dmin).half().float()


def _blocks(w: Tensor, importance: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """w [..., rows, columns] f32 and what each weight counts, [n, *shape], a block of 256 after the other."""
    counts = smoothed(importance)[..., None, :].expand_as(w)
    return w.float().reshape(-1, *shape), counts.reshape(-1, *shape)


def _nearest_unit(values: Tensor, weight: Tensor, shares: Iterable[float],
                  rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The unit [n, 1] whose multiples `rounded(values, unit)` come nearest to values [n, groups]."""
    top = values.amax(1, keepdim=True)
    error, best = torch.full_like(top, torch.inf), torch.zeros_like(top)
    for share in shares:
        unit = (top * float(share)).half().float()
        found = (weight * (values - rounded(values, unit)).square()).sum(1, keepdim=True)
        best, error = torch.where(found < error, unit, best), torch.minimum(found, error)
    return best
