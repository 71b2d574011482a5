"""Cases of the operations of a decoding step: several sequences, each at a position of its own, in rings and pages."""
from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine.mlx_case import (CLEAR, COPIED, FLOAT, Call, Case, Random, Sizes, normal, packed_rows, rope_tables)
from ds4mlx.engine.mlx_kernel_checks import Equal, Near, Rounded
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.pages import PAGE_TOKENS
from ds4mlx.ops.kv_round import Packing

SEVERAL = 5     # sequences of a case: lengths from one token up to the longest


def cases(s: Sizes) -> Iterator[Case]:
    """One sequence and several, for each operation."""
    for of_op in (_latent, _compress, _attention, _scores, _sample):
        yield from of_op(s)


def _positions(longest: int) -> Iterator[list[int]]:
    yield [longest]
    yield [0, longest // 9, longest // 3 | 3, longest - longest // 50, longest]


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _paged(rng: Random, longest: int, ratio: int, sequences: int, width: int, packing: Packing | None,
           tail: int) -> ops.Paged:
    """A pool with pages in no order: beside page 0, what the sequences hold if each is the longest."""
    page_rows, held = PAGE_TOKENS // ratio, longest // PAGE_TOKENS + 1
    pages = 1 + rng.permutation(sequences * held).reshape(sequences, held).astype(np.int32)
    return ops.Paged(packed_rows(rng, (sequences * held + 1) * page_rows, width, packing, tail), mx.array(pages),
                     page_rows)


def _on_device(positions: Sequence[int]) -> mx.array:
    return mx.array(np.array(positions, np.int32))


def _latent(s: Sizes) -> Iterator[Case]:
    c = s.config
    D, R = c.head_dim, c.qk_rope_head_dim

    def build(positions: Sequence[int], packed: bool, rng: Random) -> Call:
        B = len(positions)
        inputs = (normal(rng, B, c.q_lora_rank), normal(rng, B, D), normal(rng, c.q_lora_rank, scale=0.1, around=1),
                  normal(rng, D, scale=0.1, around=1), *rope_tables(c, positions),
                  packed_rows(rng, B * c.sliding_window, D, "fp8" if packed else None, R)
                  .reshape(B, c.sliding_window, -1), _on_device(positions))
        return lambda: ops.latent_step(*inputs, packed, c.rms_norm_eps)

    near = Near(1e-5, FLOAT)
    for positions in _positions(s.context):
        yield Case("latent_step", _sequences(len(positions)), partial(build, positions, True),
                   (near, Rounded("fp8", D, R)))
    yield Case("latent_step", "float32 rows", partial(build, [s.context], False), (near, near))


def _compress(s: Sizes) -> Iterator[Case]:
    c = s.config
    for what, ratio, width, packing in (("ratio 4", 4, c.head_dim, "fp8"), ("index rows", 4, c.index_head_dim, "fp4"),
                                        ("ratio 128", 128, c.head_dim, "fp8"), ("float32", 4, c.head_dim, None)):
        for end in (s.context, s.context + ratio - 1):      # a group that is not complete, one that is
            for positions in _positions(end):
                rows = Rounded(packing, width, c.qk_rope_head_dim) if packing else Near(1e-5, FLOAT)
                yield Case("compress_token", f"{what}, {_sequences(len(positions))} up to {end}",
                           partial(_compressing, c, ratio, width, packing, positions), (Near(1e-6, COPIED), rows))


def _compressing(c: Config, ratio: int, width: int, packing: Packing | None, positions: Sequence[int],
                 rng: Random) -> Call:
    B, m = len(positions), 2 if ratio == 4 else 1
    k, s, ape = normal(rng, B, m * width), normal(rng, B, m * width), normal(rng, ratio, m * width)
    frontiers, norm = normal(rng, B, m * ratio, 2, m * width), normal(rng, width, scale=0.1, around=1)
    tables, at = rope_tables(c, [p // ratio * ratio for p in positions]), _on_device(positions)
    last = np.array(positions)[:, None]
    age = (last - np.arange(m * ratio)) % (m * ratio)       # of the token in each place
    needed = mx.array(age < (last + 1) % ratio + (m - 1) * ratio)[..., None, None]

    def call() -> Sequence[mx.array]:
        after, rows = ops.compress_token(k, s, frontiers, ape, norm, *tables, at, ratio, packing, c.rms_norm_eps)
        return mx.where(needed, after, 0), rows
    return call


def _attention(s: Sizes) -> Iterator[Case]:
    few = s.config.index_topk * 4 - 1       # the last position from which every row of ratio 4 is attended to
    for packed in (True, False):
        for what, longest, ratio, choose in (("window only", s.context, 0, False),
                                             ("all rows of ratio 4", few, 4, False),
                                             ("all rows of ratio 128", s.context, 128, False),
                                             ("chosen rows", s.context, 4, True)):
            for positions in _positions(longest):
                if packed or choose:
                    yield Case("attention_step",
                               f"{what}, {_sequences(len(positions))}{'' if packed else ', float32 rows'}",
                               partial(_attending, s.config, positions, ratio, choose, packed), (Near(2e-5, FLOAT),))


def _attending(c: Config, positions: Sequence[int], ratio: int, choose: bool, packed: bool, rng: Random) -> Call:
    B, H, D, R = len(positions), c.num_attention_heads, c.head_dim, c.qk_rope_head_dim
    packing, longest = "fp8" if packed else None, max(positions)
    q, sink, tables = normal(rng, B, H * D), normal(rng, H), rope_tables(c, positions, ratio > 0)
    windows = packed_rows(rng, B * c.sliding_window, D, packing, R).reshape(B, c.sliding_window, -1)
    rows = _paged(rng, longest, ratio, B, D, packing, R) if ratio else None
    most, chosen = (longest + 1) // ratio if ratio else 0, None
    if choose:      # as `select_rows` has it
        chosen = ops.select_rows(normal(rng, B, most), _on_device(positions), ratio, c.index_topk)
        mx.eval(chosen)
    at = _on_device(positions)
    return lambda: [ops.attention_step(q, *tables, windows, at, rows, most, chosen, ratio, sink, c.rms_norm_eps)]


def _scores(s: Sizes) -> Iterator[Case]:
    c, H, W, R = s.config, s.config.index_n_heads, s.config.index_head_dim, s.config.qk_rope_head_dim

    def build(sequences: int, packed: bool, rng: Random) -> Call:
        packing = "fp4" if packed else None
        q = packed_rows(rng, sequences * H, W, packing, R).reshape(sequences, H, -1)
        weight, rows = normal(rng, sequences, H), _paged(rng, s.context, 4, sequences, W, packing, R)
        return lambda: [ops.index_scores_step(q, weight, rows, s.context // 4, (W * H) ** -0.5)]

    for sequences, packed in ((1, True), (SEVERAL, True), (1, False)):
        held = "packed" if packed else "float32"
        yield Case("index_scores_step", f"{held}, {s.context // 4} rows, {_sequences(sequences)}",
                   partial(build, sequences, packed), (Near(1e-5, FLOAT),))


def _sample(s: Sizes) -> Iterator[Case]:
    V, likely = s.config.vocab_size, 40
    ways = [(1.0, 0, 0.0, 1.0), (0.0, 0, 0.0, 1.0), (1.0, 20, 0.0, 1.0), (1.0, 0, 0.05, 1.0), (1.0, 0, 0.0, 0.9)]

    def build(rng: Random) -> Call:
        """Tokens each 0.1 below the one before, the rest out of reach, and a draw well within the best one's share."""
        logits = np.full((len(ways), V), -30, np.float32)
        logits[:, rng.choice(V, likely, replace=False)] = -0.1 * np.arange(likely)
        given, uniform = mx.array(logits), np.full(len(ways), 0.05)
        return lambda: [ops.sample(given, uniform, *map(np.array, zip(*ways, strict=True)))]
    yield Case("sample", f"{len(ways)} rows, each in its own way", build, (Equal(CLEAR),))
