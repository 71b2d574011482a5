"""Experts for training: every token through all of them in three products, with weight 0 where it is not sent."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.tiny.training.attention import Mode
from ds4mlx.tiny.training.parts import linear, matrix

TABLE_SEED = 20261130
KEPT = 0.98             # of what was seen before, a step
MATRICES = ("experts_w1", "experts_w3", "experts_w2")


class Load(NamedTuple):
    """What a batch was to each expert, without gradient."""
    share: Tensor       # [E] of the tokens
    inputs: Tensor      # [E, D], squares of what its gate and up are multiplied with, over the number of all tokens
    middle: Tensor      # [E, F], the same of its down: SwiGLU rows times their route's weight


class Seen(nn.Module):
    """The loads of late: how much each column of an expert counts, as an imatrix has it."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        for name, shape in (("share", (experts,)), ("input_sums", (experts, width)), ("middle_sums", (experts, inner))):
            self.register_buffer(name, torch.zeros(shape), persistent=False)

    def add(self, load: Load) -> None:
        for held, new in zip((self.share, self.input_sums, self.middle_sums), load, strict=True):
            held.lerp_(new, 1 - KEPT)

    def inputs(self) -> Tensor:
        """Mean squares [E, D]; 0 for an expert that nothing was sent to."""
        return self.input_sums / self.share.clamp(min=1e-12)[:, None]

    def middle(self) -> Tensor:
        """Mean squares [E, F]."""
        return self.middle_sums / self.share.clamp(min=1e-12)[:, None]


class MoE(nn.Module):
    """Routed experts and the shared one, which is multiplied as one more of them."""

    def __init__(self, config: Config, hashed: bool) -> None:
        super().__init__()
        E, F_, D = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate = matrix(E, D)
        self.experts_w1, self.experts_w3 = matrix(E, F_, D), matrix(E, F_, D)
        self.experts_w2 = matrix(E, D, F_, gain=0.3)
        self.shared_w1, self.shared_w3 = matrix(F_, D), matrix(F_, D)
        self.shared_w2 = matrix(D, F_, gain=0.3)
        if hashed:
            self.register_buffer("gate_tid2eid", expert_table(config))
        else:
            self.register_buffer("gate_bias", torch.zeros(E))
        for name in MATRICES:   # what few bits make of the weights, less the weights: see `few_bits`
            self.register_buffer(f"{name}_error", torch.zeros_like(getattr(self, name)), persistent=False)
        self.seen = Seen(E, D, F_)
        self.config, self.hashed = config, hashed

    def forward(self, x: Tensor, ids: Tensor, mode: Mode) -> tuple[Tensor, Load]:
        """x [B, T, D] f32, normalised, to routed + shared [B, T, D] and what each expert had of it."""
        c, (w1, w3, w2) = self.config, (getattr(self, name) + getattr(self, f"{name}_error") for name in MATRICES)
        weight, chosen = self._route(x, ids)
        weight = F.pad(weight, (0, 1), value=1.0)                                   # the shared expert's
        g, u = (linear(x, torch.cat([w.flatten(0, 1), shared]), mode.dtype)
                for w, shared in ((w1, self.shared_w1), (w3, self.shared_w3)))
        mid = F.silu(g.float().clamp(max=c.swiglu_limit)) * u.float().clamp(-c.swiglu_limit, c.swiglu_limit)
        mid = mid.unflatten(-1, (-1, c.moe_intermediate_size)) * weight[..., None]
        down = torch.cat([w2, self.shared_w2[None]]).transpose(1, 2).flatten(0, 1)  # [(E + 1) F, D]
        return mid.flatten(-2).to(mode.dtype) @ down.to(mode.dtype), _load(x.detach(), chosen, mid.detach())

    def _route(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [B, T, E], 0 where not chosen, and 1 where chosen."""
        k = self.config.num_experts_per_tok
        prob = torch.sqrt(F.softplus(linear(x, self.gate, torch.float32)))
        if self.hashed:
            chosen = F.one_hot(self.gate_tid2eid[ids], prob.shape[-1]).sum(-2)
        else:
            score = (prob + self.gate_bias).detach()
            chosen = (score[..., None, :] > score[..., :, None]).sum(-1) < k        # fewer than k are better
        prob = prob * chosen
        weight = prob / prob.sum(-1, keepdim=True) * self.config.routed_scaling_factor
        return weight, chosen.float()


def _load(x: Tensor, chosen: Tensor, mid: Tensor) -> Load:
    squares = torch.einsum("bte,btd->ed", chosen, x.square()) / (x.shape[0] * x.shape[1])
    return Load(chosen.mean((0, 1)), squares, mid[..., :-1, :].square().mean((0, 1)))


def expert_table(config: Config) -> Tensor:
    """Distinct experts of each token id, i64 [V, k], all experts equally often."""
    drawn = torch.rand(config.vocab_size, config.n_routed_experts, generator=torch.Generator().manual_seed(TABLE_SEED))
    return drawn.argsort(dim=1)[:, :config.num_experts_per_tok]
