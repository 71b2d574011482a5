"""What the q2 recipe makes of expert matrices, fast enough to train with: IQ2_XXS for gate and up, Q2_K for down.

The quantiser searches further; this finds scales among a few and codes nearest to them. It is what weights get used to.
"""
import torch
from torch import Tensor

from ds4mlx.gguf.dequant import IQ2_GRID
from ds4mlx.tiny.training.model import Model

OFFSETS = (0.9, 0.4, -0.1, -0.6)                 # by which the codes of Q2_K overhang the ends of a run
SCALES = (0.55, 0.65, 0.75, 0.85, 0.95, 1.05)   # of a group's largest weight over the grid's largest value


@torch.no_grad()
def round_experts(model: Model) -> None:
    """Set what the experts' weights lose, which their layers then add to them."""
    for layer in model.layers:
        for name, rounded in (("experts_w1", iq2_xxs), ("experts_w3", iq2_xxs), ("experts_w2", q2_k)):
            weight = getattr(layer.ffn, name)
            getattr(layer.ffn, f"{name}_error").copy_(rounded(weight) - weight)


def iq2_xxs(w: Tensor) -> Tensor:
    """w [..., 256 n] by a grid of 256 vectors of 8 sizes; signs of which an even number is negative; a scale of 4 bits
    for each 32 weights and one for 256."""
    x = w.reshape(-1, 8, 32)
    grid = torch.as_tensor(IQ2_GRID, dtype=torch.float32, device=w.device)
    most = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / grid.max()             # [n, 8, 1]
    best, error = most, torch.full_like(most, float("inf"))
    for factor in SCALES:
        code = _eights(x, most * factor, grid)
        fitted = (code * x).sum(-1, keepdim=True) / code.square().sum(-1, keepdim=True)
        off = (x - fitted * code).square().sum(-1, keepdim=True)
        best, error = torch.where(off < error, fitted, best), torch.minimum(off, error)
    unit = best.amax(1, keepdim=True) / 31                                          # scales are odd multiples of it
    step = ((best / unit - 1) / 2).round().clamp(0, 15)
    scale = (2 * step + 1) * unit
    return (_eights(x, scale, grid) * scale).reshape(w.shape)


def _eights(x: Tensor, scale: Tensor, grid: Tensor) -> Tensor:
    """Signed grid vectors nearest to x / scale, [n, 8, 32]."""
    eight = (x / scale).reshape(-1, 8)
    size = eight.abs()
    odd = (eight < 0).sum(-1, keepdim=True) % 2 == 1
    flip = odd & (torch.arange(8, device=x.device) == size.argmin(-1, keepdim=True))    # the one that costs least
    target = torch.where(flip, -size, size)
    nearest = (target @ grid.T - grid.square().sum(-1) / 2).argmax(-1)
    sign = torch.where((eight < 0) ^ flip, -1.0, 1.0)
    return (grid[nearest] * sign).reshape(x.shape)


def q2_k(w: Tensor) -> Tensor:
    """w [..., 256 n] as scale * (0 … 3) - least, each of 4 bits for each 16 weights, and one of both for 256."""
    x = w.reshape(-1, 16, 16)
    low = x.amin(-1, keepdim=True).clamp(max=0)
    width = (x.amax(-1, keepdim=True) - low).clamp(min=1e-12)
    error, best_scale, best_least = torch.full_like(width, float("inf")), width, -low
    for offset in OFFSETS:
        scale, least = width / (3 + offset), -low
        for _ in range(2):      # the second time on the line that the first one found
            code = ((x + least) / scale).round().clamp(0, 3)
            scale, least = _fit(x, code, scale, least)
            off = (x - scale * code + least).square().sum(-1, keepdim=True)
            better = off < error
            best_scale, best_least = torch.where(better, scale, best_scale), torch.where(better, least, best_least)
            error = torch.minimum(off, error)
    scale, least = _four_bits(best_scale), _four_bits(best_least)
    code = ((x + least) / scale.clamp(min=1e-12)).round().clamp(0, 3)
    return (scale * code - least).reshape(w.shape)


def _fit(x: Tensor, code: Tensor, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares for given codes, where that gives a scale above 0 and a least of at least 0."""
    mean, code_mean = x.mean(-1, keepdim=True), code.mean(-1, keepdim=True)
    spread = (code - code_mean).square().sum(-1, keepdim=True)
    fitted = ((code - code_mean) * (x - mean)).sum(-1, keepdim=True) / spread.clamp(min=1e-6)
    moved = fitted * code_mean - mean
    good = (spread > 1e-6) & (fitted > 0) & (moved >= 0)
    return torch.where(good, fitted, scale), torch.where(good, moved, least)


def _four_bits(a: Tensor) -> Tensor:
    """a [n, 16, 1] as 0 … 15 times a unit of the 16: the best of a few."""
    best, error = a, torch.full_like(a[:, :1], float("inf"))
    for share in (0.9, 0.95, 1.0, 1.05):
        unit = a.amax(1, keepdim=True).clamp(min=1e-12) * (share / 15)
        tried = (a / unit).round().clamp(0, 15) * unit
        off = (tried - a).square().sum(1, keepdim=True)
        best, error = torch.where(off < error, tried, best), torch.minimum(off, error)
    return best
