"""The low-precision rounding that the official code applies to attention memory and transformers does not, in torch."""
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from oracle.weights import CONFIG

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_MIDDLES = (E2M1[1:] + E2M1[:-1]) / 2


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least x > 0, from the exponent bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def fp8(row: torch.Tensor, rotary: int) -> torch.Tensor:
    """E4M3 and back with one power-of-two scale per 64 channels; the last `rotary` channels are kept."""
    plain, tail = row[..., :-rotary], row[..., -rotary:]
    block = plain.reshape(*plain.shape[:-1], -1, 64)
    scale = power_of_two_above(block.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0)
    rounded = (block / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([rounded.reshape(plain.shape), tail], -1)


def hadamard_fp4(row: torch.Tensor) -> torch.Tensor:
    """Normalised Walsh-Hadamard over the row, then E2M1 with a power-of-two scale per 32 channels."""
    width = row.shape[-1]
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    block = (row @ matrix * width ** -0.5).reshape(*row.shape[:-1], -1, 32)
    scale = power_of_two_above(block.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0 ** -126) / 6.0)
    value = (block / scale).clamp(-6.0, 6.0)
    lower = torch.bucketize(value.abs(), E2M1_MIDDLES)
    upper = torch.bucketize(value.abs(), E2M1_MIDDLES, right=True)  # differs from `lower` on a tie: the even code wins
    return (E2M1[torch.where(lower % 2 == 0, lower, upper)] * value.sign() * scale).reshape(row.shape)


@contextmanager
def rounded_memory() -> Iterator[None]:
    """While entered, transformers rounds right after every rotation, which is where the official code does.

    Inside the indexer everything rotated is rounded to FP4; elsewhere only rows of one head (attention memory) are
    rounded to FP8, queries and outputs (more heads) are not.
    """
    rotate, index = hf.apply_rotary_pos_emb, hf.DeepseekV4Indexer.forward
    in_indexer, rotary = False, int(CONFIG["qk_rope_head_dim"])

    def rotate_and_round(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
        rotated = rotate(x, cos, sin, unsqueeze_dim)
        if in_indexer:
            return hadamard_fp4(rotated)
        return fp8(rotated, rotary) if rotated.shape[1] == 1 else rotated

    def marked(module: torch.nn.Module, *args: object, **named: object) -> torch.Tensor:
        nonlocal in_indexer
        in_indexer = True
        try:
            return index(module, *args, **named)
        finally:
            in_indexer = False

    hf.apply_rotary_pos_emb, hf.DeepseekV4Indexer.forward = rotate_and_round, marked
    try:
        yield
    finally:
        hf.apply_rotary_pos_emb, hf.DeepseekV4Indexer.forward = rotate, index
