"""Attention for training: whole rows of a batch at once, with every product dense and every mask static.

The window goes by blocks of queries over twice as many keys, compressed rows are all multiplied and masked. Scores
are bounded, since queries and rows are normalised, so that the softmax needs no maximum.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.tiny.training.parts import Tables, linear, matrix, rms, rotate, scaled_rms, vector
from ds4mlx.tiny.training.rounding import fp4_vectors, fp8_rows, hadamard

HIDDEN = -1e30      # a score that nothing is chosen by
LARGEST_SCORE = 60.0


@dataclass(frozen=True, slots=True)
class Mode:
    """How a layer runs. Each value of it is compiled by itself."""
    dtype: torch.dtype = torch.bfloat16     # of products
    rounding: bool = True                   # rows are rounded as the engine rounds them
    choosing: bool = True                   # the indexer chooses; else all rows are attended to


class Compressor(nn.Module):
    """Every `ratio` tokens to one row of `width` channels."""

    def __init__(self, config: Config, ratio: int, width: int) -> None:
        super().__init__()
        columns = width * (2 if ratio == 4 else 1)
        self.wkv, self.wgate = matrix(columns, config.hidden_size), matrix(columns, config.hidden_size)
        self.ape = nn.Parameter(torch.randn(ratio, columns) * 0.5)
        self.norm = vector(width)
        self.ratio, self.width = ratio, width

    def forward(self, x: Tensor, tables: Tables, mode: Mode) -> Tensor:
        """x [B, T, D] to rotated rows [B, T / ratio, width] f32."""
        r, w = self.ratio, self.width
        k = linear(x, self.wkv, mode.dtype).float().unflatten(1, (-1, r))           # [B, G, r, columns]
        s = linear(x, self.wgate, mode.dtype).float().unflatten(1, (-1, r)) + self.ape
        if r == 4:
            k, s = (torch.cat([F.pad(a[:, :-1, :, :w], (0, 0, 0, 0, 1, 0), value=empty), a[..., w:]], dim=2)
                    for a, empty in ((k, 0.0), (s, HIDDEN)))
        row = scaled_rms((torch.softmax(s, dim=2) * k).sum(2), self.norm)
        return rotate(row, tuple(table[::r] for table in tables))


class Indexer(nn.Module):
    """Chooses compressed rows. It learns from what the layer attends to and not from the loss, while `teaching`.

    It runs as it stands: compiled, its gradient was not a number within a hundred steps.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wq_b = matrix(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        self.weights_proj = matrix(config.index_n_heads, config.hidden_size)
        self.compressor = Compressor(config, 4, config.index_head_dim)
        self.register_buffer("turn", hadamard(config.index_head_dim), persistent=False)
        self.heads, self.scale = config.index_n_heads, (config.index_n_heads * config.index_head_dim) ** -0.5
        self.most, self.teaching = config.index_topk, True

    @torch.compiler.disable
    def forward(self, x: Tensor, qr: Tensor, wanted: Tensor, seen: Tensor, tables: Tables,
                mode: Mode) -> tuple[Tensor, Tensor]:
        """x [B, T, D], qr [B, T, Q], what heads gave to each row `wanted` [B, T, C], the rows that there are `seen`
        [T, C], to those that are chosen [B, T, C] and the loss."""
        with torch.set_grad_enabled(self.teaching and torch.is_grad_enabled()):
            score = self.scores(x.detach(), qr.detach(), tables, mode)
        chosen = seen.expand_as(score)
        if mode.choosing and score.shape[-1] > self.most:
            chosen = best(torch.where(seen, score.detach(), HIDDEN), self.most)
        if self.teaching:
            return chosen, index_loss(score, wanted, seen)
        return chosen, sum(0.0 * parameter.sum() for parameter in self.parameters())

    def scores(self, x: Tensor, qr: Tensor, tables: Tables, mode: Mode) -> Tensor:
        """x [B, T, D], qr [B, T, Q] to scores [B, T, T / 4] f32."""
        q = rotate(linear(qr, self.wq_b, mode.dtype).float().unflatten(-1, (self.heads, -1)), spread(tables))
        rows = self.compressor(x, tables, mode)
        if mode.rounding:
            q, rows = fp4_vectors(q, self.turn), fp4_vectors(rows, self.turn)
        dots = q.flatten(1, 2).to(mode.dtype) @ rows.to(mode.dtype).transpose(1, 2)
        weight = linear(x, self.weights_proj, torch.float32) * self.scale           # [B, T, heads]
        return (F.relu(dots.unflatten(1, (-1, self.heads)).float()) * weight[..., None]).sum(2)


def spread(tables: Tables) -> Tables:
    """Tables [T, P] for vectors [B, T, heads, d]."""
    return tuple(table[:, None] for table in tables)


class Attention(nn.Module):
    """Parameters are named as in the checkpoint."""

    def __init__(self, config: Config, ratio: int) -> None:
        super().__init__()
        c, heads = config, config.num_attention_heads * config.head_dim
        self.wq_a, self.wq_b = matrix(c.q_lora_rank, c.hidden_size), matrix(heads, c.q_lora_rank)
        self.wkv = matrix(c.head_dim, c.hidden_size)
        self.wo_a = matrix(c.o_groups * c.o_lora_rank, heads // c.o_groups)
        self.wo_b = matrix(c.hidden_size, c.o_groups * c.o_lora_rank, gain=0.3)
        self.q_norm, self.kv_norm = vector(c.q_lora_rank), vector(c.head_dim)
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))
        self.config, self.ratio = config, ratio
        if ratio:
            self.compressor = Compressor(c, ratio, c.head_dim)
        if ratio == 4:
            self.indexer = Indexer(c)

    def forward(self, x: Tensor, tables: Tables, mode: Mode) -> tuple[Tensor, Tensor]:
        """x [B, T, D] f32, normalised, T a multiple of the window, to [B, T, D] and the indexer's loss."""
        c, tail = self.config, self.config.qk_rope_head_dim
        qr = scaled_rms(linear(x, self.wq_a, mode.dtype).float(), self.q_norm)
        q = rms(linear(qr, self.wq_b, mode.dtype).float().unflatten(-1, (-1, c.head_dim)))
        q = (rotate(q, spread(tables)) * c.head_dim ** -0.5).to(mode.dtype)         # [B, T, H, d]
        kv = rotate(scaled_rms(linear(x, self.wkv, mode.dtype).float(), self.kv_norm), tables)
        kv = (fp8_rows(kv, tail) if mode.rounding else kv).to(mode.dtype)
        num, den = self._window(q, kv)
        den = den + torch.exp(self.attn_sink)[:, None]
        loss = 0.0 * self.attn_sink.sum()   # with a gradient in every layer, so that what follows is compiled once
        if self.ratio:
            rows = self.compressor(x, tables, mode)
            rows = (fp8_rows(rows, tail) if mode.rounding else rows).to(mode.dtype)
            num, den, loss = self._compressed(q, rows, num, den, x, qr, tables, mode)
        o = rotate(num.float() / den, spread((tables[0], -tables[1]))).to(mode.dtype)
        low = torch.einsum("btgi,gri->btgr", o.flatten(2).unflatten(-1, (c.o_groups, -1)),
                           self.wo_a.to(mode.dtype).unflatten(0, (c.o_groups, -1)))
        return linear(low.flatten(2), self.wo_b, mode.dtype), loss

    def _window(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of rows times exp(score) and of exp(score), over the last rows of each query: [B, T, H, d], [.., 1]."""
        W, (_, T, H, d) = self.config.sliding_window, q.shape
        own = kv.unflatten(1, (-1, W))                                              # [B, blocks, W, d]
        keys = torch.cat([F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own], dim=2)      # [B, blocks, 2 W, d]
        z = (q.unflatten(1, (-1, W)).flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, (W, H))
        query = torch.arange(W, device=q.device)[:, None, None]
        key = torch.arange(2 * W, device=q.device)
        block = torch.arange(T // W, device=q.device)[:, None, None, None]
        seen = (key > query) & (key <= query + W) & ((block > 0) | (key >= W))      # [blocks, W, 1, 2 W]
        p = torch.where(seen, torch.exp(z.float().clamp(max=LARGEST_SCORE)), 0.0)
        num = p.to(q.dtype).flatten(2, 3) @ keys                                    # [B, blocks, W H, d]
        return num.flatten(1, 2).unflatten(1, (T, H)), p.sum(-1, keepdim=True).flatten(1, 2)

    def _compressed(self, q: Tensor, rows: Tensor, num: Tensor, den: Tensor, x: Tensor, qr: Tensor, tables: Tables,
                    mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
        """The same sums with those over compressed rows [B, C, d] added, and the indexer's loss."""
        _, T, H, _ = q.shape
        z = (q.flatten(1, 2) @ rows.transpose(1, 2)).unflatten(1, (T, H))           # [B, T, H, C]
        count = torch.arange(1, T + 1, device=q.device)[:, None] // self.ratio
        seen = torch.arange(rows.shape[1], device=q.device) < count                 # [T, C]
        p = torch.where(seen[:, None], torch.exp(z.float().clamp(max=LARGEST_SCORE)), 0.0)
        loss = 0.0 * self.attn_sink.sum()
        if self.ratio == 4:
            wanted = (p / (den + p.sum(-1, keepdim=True))).detach().sum(2) / H      # [B, T, C]
            chosen, loss = self.indexer(x, qr, wanted, seen, tables, mode)
            p = torch.where(chosen[:, :, None], p, 0.0)
        added = (p.to(q.dtype).flatten(1, 2) @ rows).unflatten(1, (T, H))
        return num + added, den + p.sum(-1, keepdim=True), loss


def best(score: Tensor, k: int) -> Tensor:
    """Which of score [B, T, C] are among the k largest of their query."""
    return score >= score.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def index_loss(score: Tensor, wanted: Tensor, seen: Tensor) -> Tensor:
    """Cross entropy of softmax(score) to what the heads gave to each row, a query counting by how much that is."""
    mass = wanted.sum(-1, keepdim=True)
    share = (wanted + 1e-4 * seen) / (mass + 1e-4 * seen.sum(-1, keepdim=True)).clamp(min=1e-6)
    top = torch.where(seen, score, -1e4).amax(-1, keepdim=True).detach()
    above = torch.where(seen, score - top, 0.0)
    log_sum = torch.log(torch.where(seen, torch.exp(above), 0.0).sum(-1, keepdim=True) + 1e-6)
    return (share * (log_sum - above) * (mass + 0.02)).sum(-1).mean()
