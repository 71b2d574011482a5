"""The roundings of the model's definition, straight-through: forward as the engine does, backward as if not rounded."""
import torch
from torch import Tensor

FP8_BLOCK, FP8_MAX = 64, 448.0
FP4_BLOCK, FP4_MAX = 32, 6.0
LEAST = 1e-30       # the model's own bound, 6 * 2^-126, is where GPUs take numbers for 0


def fp8_rows(rows: Tensor, tail: int) -> Tensor:
    """Rows [..., d] f32 with all but the last `tail` channels rounded to E4M3, 64 to a power of two; the tail to half
    precision, in which the cache holds it."""
    plain = rows[..., :-tail].unflatten(-1, (-1, FP8_BLOCK))
    scale = _scale(plain, FP8_MAX, 1e-4)
    coded = (plain / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale
    rounded = torch.cat([coded.flatten(-2), rows[..., -tail:].half().float()], dim=-1)
    return rows + (rounded - rows).detach()


def fp4_vectors(v: Tensor, turn: Tensor) -> Tensor:
    """Vectors [..., w] times the matrix `hadamard(w)`, rounded to E2M1, 32 to a power of two. Products of two such
    vectors differ from those of v by the rounding only."""
    turned = v.float() @ turn
    block = turned.unflatten(-1, (-1, FP4_BLOCK))
    scale = _scale(block, FP4_MAX, LEAST)
    size = (block / scale).abs().clamp(max=FP4_MAX)
    # Steps of 1/2 below 2, of 1 below 4, of 2 above; torch.round takes ties to even, which is the even code.
    steps = torch.where(size < 2, (2 * size).round() / 2, torch.where(size < 4, size.round(), 2 * (size / 2).round()))
    rounded = (steps * block.sign() * scale).flatten(-2)
    return turned + (rounded - turned).detach()


def _scale(block: Tensor, most: float, least: float) -> Tensor:
    """The least power of two over which `block` [..., n] stays within `most`, [..., 1]."""
    return torch.exp2(torch.ceil(torch.log2(block.detach().abs().amax(-1, keepdim=True).clamp(min=least) / most)))


def hadamard(width: int) -> Tensor:
    """Sylvester's matrix [width, width] over the root of the width: symmetric and orthogonal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width ** -0.5
