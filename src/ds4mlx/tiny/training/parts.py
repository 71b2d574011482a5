"""What the parts of the training graph share: products, norms, rotation, and how parameters begin."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
Tables = tuple[Tensor, Tensor]      # cos and sin [positions, pairs]


def matrix(*shape: int, gain: float = 1.0) -> nn.Parameter:
    """[..., out, in], keeping the scale of its input if gain is 1."""
    return nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)


def vector(width: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(width))


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def scaled_rms(x: Tensor, scale: Tensor) -> Tensor:
    return rms(x) * scale


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """The last channels of x [..., d] f32 turned in pairs of neighbours, as many as the tables have."""
    cos, sin = tables
    plain, turned = x.tensor_split([x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([plain, torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)], dim=-1)
