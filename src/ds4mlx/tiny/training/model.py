"""The graph of DeepSeek V4 in PyTorch, written for training: few launches, static shapes, all experts at once.

It computes what `models/deepseek_v4` computes, from parameters of the same names. Where that runs one sequence with a
cache, this runs whole rows of a batch; where that reads only chosen experts and rows, this multiplies by all of them
and masks, which on a GPU costs less than to gather.
"""
import numpy as np
import torch
from torch import Tensor, nn

from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.tiny.training.attention import Attention, Mode
from ds4mlx.tiny.training.experts import Load, MoE
from ds4mlx.tiny.training.parts import EPS, Tables, linear, matrix, rms, scaled_rms, vector
from ds4mlx.tiny.training.sinkhorn import sinkhorn


def hyper(prefix: str, module: nn.Module, config: Config, first: int) -> None:
    """Give the module a hyper-connection's parameters: it reads stream `first` most and hardly mixes the streams."""
    n = config.hc_mult
    base = torch.cat([torch.full((n,), -1.5), torch.randn(n) * 0.3, (4.0 * torch.eye(n)).flatten()])
    base[first % n] = 1.5
    setattr(module, f"{prefix}_fn", nn.Parameter(torch.randn((2 + n) * n, n * config.hidden_size) * 0.01))
    setattr(module, f"{prefix}_scale", nn.Parameter(torch.ones(3)))
    setattr(module, f"{prefix}_base", nn.Parameter(base))


class Layer(nn.Module):
    """Attention, then experts, each between a mix of the four streams and its inverse."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        hyper("hc_attn", self, config, 2 * index)
        hyper("hc_ffn", self, config, 2 * index + 1)
        self.attn_norm, self.ffn_norm = vector(config.hidden_size), vector(config.hidden_size)
        self.attn = Attention(config, config.compress_ratios[index])
        self.ffn = MoE(config, hashed=index < config.num_hash_layers)
        self.config = config

    def forward(self, streams: Tensor, ids: Tensor, tables: Tables, mode: Mode) -> tuple[Tensor, Tensor, Load]:
        """streams [B, T, 4, D] f32, ids [B, T] to the streams behind the layer, the indexer's loss, and what each
        expert had."""
        x, post, m = self._enter(streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        y, loss = self.attn(scaled_rms(x, self.attn_norm), tables, mode)
        streams = _leave(streams, y, post, m)
        x, post, m = self._enter(streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        y, load = self.ffn(scaled_rms(x, self.ffn_norm), ids, mode)
        return _leave(streams, y, post, m), loss, load

    def _enter(self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.config.hc_mult
        flat = streams.flatten(2)
        mix = linear(flat, fn, torch.float32) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        pre = torch.sigmoid(mix[..., :n] * scale[0] + base[:n]) + self.config.hc_eps
        post = 2 * torch.sigmoid(mix[..., n:2 * n] * scale[1] + base[n:2 * n])
        m = sinkhorn((mix[..., 2 * n:] * scale[2] + base[2 * n:]).reshape(-1, n, n), self.config.hc_sinkhorn_iters,
                     self.config.hc_eps)
        return (pre[..., None] * streams).sum(2), post, m.view(*mix.shape[:-1], n, n)


def _leave(streams: Tensor, y: Tensor, post: Tensor, m: Tensor) -> Tensor:
    """H'[j] = post[j] y + sum_i m[i][j] H[i]."""
    mixed = sum(m[..., i, :, None] * streams[..., i, None, :] for i in range(streams.shape[2]))
    return post[..., None] * y.float()[..., None, :] + mixed


class Model(nn.Module):
    """Parameters have the paths of `models.deepseek_v4.names`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.config = config
        self.embed = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = vector(c.hidden_size)
        self.head = matrix(c.vocab_size, c.hidden_size, gain=0.3)
        self.hc_head_fn = nn.Parameter(torch.randn(c.hc_mult, c.hc_mult * c.hidden_size) * 0.01)
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        self.hc_head_base = nn.Parameter(torch.zeros(c.hc_mult))
        self._tables: dict[tuple[int, bool], Tables] = {}

    def forward(self, ids: Tensor, mode: Mode) -> tuple[Tensor, Tensor, list[Load]]:
        """ids int [B, T], T a multiple of the window, to hidden [B, T, D], the sum of the indexers' losses, and the
        layers' loads. `logits` does the rest."""
        streams = self.embed[ids][:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        loss, loads = self.embed.new_zeros(()), []
        for layer in self.layers:
            streams, its_loss, load = layer(streams, ids, self.tables(ids.shape[1], layer.attn.ratio > 0), mode)
            loss, loads = loss + its_loss, [*loads, load]
        return self._collapse(streams), loss, loads

    def _collapse(self, streams: Tensor) -> Tensor:
        mix = linear(rms(streams.flatten(2)), self.hc_head_fn, torch.float32)
        pre = torch.sigmoid(mix * self.hc_head_scale + self.hc_head_base) + self.config.hc_eps
        return scaled_rms((pre[..., None] * streams).sum(2), self.norm)

    def logits(self, hidden: Tensor, mode: Mode) -> Tensor:
        return linear(hidden, self.head, mode.dtype).float()

    def tables(self, length: int, compressed: bool) -> Tables:
        """cos and sin of positions 0 … length - 1, as the engine makes them."""
        if (length, compressed) not in self._tables:
            made = rope.tables(np.arange(length), rope.frequencies(self.config, compressed))
            self._tables[length, compressed] = tuple(torch.from_numpy(a).to(self.embed.device) for a in made)
        return self._tables[length, compressed]
