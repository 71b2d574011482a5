"""Muon for the matrices of the layers, AdamW for everything else.

Muon steps along the orthogonal factor of a matrix's momentum: all its directions learn at one rate, and the weights
keep no outliers that few bits would have to spend themselves on. Matrices of a shape go through it together.
"""
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)   # singular values to about 1 in five iterations
ITERATIONS = 5
ADAM_ONLY = ("embed", "head", "gate", "weights_proj", "ape", "hc_")


def is_hidden_matrix(path: str, parameter: Tensor) -> bool:
    last = path.rpartition(".")[2]
    return parameter.ndim >= 2 and not last.startswith(ADAM_ONLY)


class Muon:
    """Nesterov momentum, orthogonalised; decay is decoupled."""

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[tuple(parameter.shape[-2:])].append(parameter)
        self.groups = {shape: (group, torch.zeros(sum(p.numel() for p in group) // (shape[0] * shape[1]), *shape,
                                                  device=group[0].device))
                       for shape, group in groups.items()}
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (rows, columns), (group, held) in self.groups.items():
            gradient = torch.cat([p.grad.reshape(-1, rows, columns) for p in group])
            held.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp_(held, self.momentum))
            update = update.float() * (-rate * max(1, rows / columns) ** 0.5)
            parts = update.split([p.numel() // (rows * columns) for p in group])
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, [part.view_as(p) for part, p in zip(parts, group, strict=True)])


def orthogonal(g: Tensor) -> Tensor:
    """U V' of the singular value decompositions of g [n, rows, columns], nearly; bf16."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    return x if wide else x.mT


class Optimizer:
    """Both, with one schedule: each rate is its own times a factor."""

    def __init__(self, model: nn.Module, matrix_rate: float, rate: float) -> None:
        hidden = {path: p for path, p in model.named_parameters() if is_hidden_matrix(path, p)}
        others = {path: p for path, p in model.named_parameters() if path not in hidden}
        tables = [p for path, p in others.items() if path in ("embed", "head")]
        rest = [p for path, p in others.items() if path not in ("embed", "head")]
        on_gpu = next(iter(hidden.values())).is_cuda
        self.muon, self.matrix_rate = Muon(hidden.values()), matrix_rate
        self.adam = torch.optim.AdamW([{"params": tables, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
                                      lr=rate, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu)
        self.rates, self.parameters = [rate, rate], list(model.parameters())

    def step(self, factor: float) -> None:
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        for parameter in self.parameters:   # a step without one gradient is better than none after it
            torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
        self.adam.step()
        self.muon.step(self.matrix_rate * factor)
        self.adam.zero_grad(set_to_none=True)
        for group, _ in self.muon.groups.values():
            for parameter in group:
                parameter.grad = None
