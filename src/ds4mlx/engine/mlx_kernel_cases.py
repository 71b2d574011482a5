"""What every kernel is tried on: each op as the graph calls it, on a model's real shapes and seeded random inputs.

Decode and prefill have kernels of their own, and their variants by tokens and types are compiled apart, so each is a
case. Stacks hold a few experts, which lie as those of a whole layer do.
"""
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine import mlx_step_cases
from ds4mlx.engine.mlx_case import (CLEAR, COPIED, EXPERTS, FLOAT, SIZES, Call, Case, Random, Sizes, all_forms, blocks,
                                    chosen_experts, few_and_many, in_words, normal, packed_rows, product_check,
                                    rope_tables)
from ds4mlx.engine.mlx_kernel_checks import Equal, Near, Rounded
from ds4mlx.engine.mlx_plan import RECIPES
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.ops.kv_round import Packing


def cases(s: Sizes) -> Iterator[Case]:
    """All of them, op by op."""
    for of_op in (_dequantize, _dense, _experts, _hyper, _latent, _compress, _attention, _indexer, _route, _sample):
        yield from of_op(s)
    yield from mlx_step_cases.cases(s)


# ---- cases of each op

def _dequantize(s: Sizes) -> Iterator[Case]:
    def build(kind: str, rng: Random) -> Call:
        w = blocks(rng, kind, 512, s.config.hidden_size)
        return lambda: [ops.dequantize(w.raw, kind)]

    for kind in BLOCK_TYPES:
        if kind != "I32":
            yield Case("dequantize", kind, partial(build, kind),
                       (Near(2.0 ** -22, "a multiplication may be fused with the subtraction after it"),))


Matrix = tuple[str, int, int]   # type, rows, columns


def _dense(s: Sizes) -> Iterator[Case]:
    """The graph's products: those of one input in one launch, those of groups, and single ones."""
    c, D = s.config, s.config.hidden_size
    mine = [("Q8_0", c.q_lora_rank, D), ("Q8_0", c.head_dim, D)]
    wide, index = ("F16", 2 * c.head_dim, D), ("F16", 2 * c.index_head_dim, D)
    low, heads = c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim
    chosen = [*mine, wide, wide, index, index, ("F16", c.index_n_heads, D)]
    ends = [(s.decode[0], False), (s.prefill[-1], False)]
    for tokens, exact in ends:
        yield _products("attention input, window only", mine, tokens, exact)
        yield _products("attention input, ratio 128", [*mine, *[("F16", c.head_dim, D)] * 2], tokens, exact)
    queries = [("Q8_0", heads, c.q_lora_rank), ("F16", c.index_n_heads * c.index_head_dim, c.q_lora_rank)]
    for tokens, exact in all_forms(s):
        yield _products("attention input, ratio 4", chosen, tokens, exact)
        yield _product("attention output, groups", ("Q8_0", low, heads // c.o_groups), tokens, exact, c.o_groups)
    for tokens, exact in ends:
        yield _products("queries and index queries", queries, tokens, exact)
        yield _product("attention output", ("Q8_0", D, low), tokens, exact)
        yield _product("router", ("F16", c.n_routed_experts, D), tokens, exact)
        for kind in ("Q4_K", "MXFP4", "F32", "BF16"):
            yield _product(f"attention output in {kind}", (kind, D, low), tokens, exact)
    yield _product("output matrix", ("Q8_0", c.vocab_size, D), s.decode[0], False)


def _products(what: str, matrices: Sequence[Matrix], tokens: int, exact: bool) -> Case:
    def build(rng: Random) -> Call:
        x = normal(rng, tokens, matrices[0][2])
        ws = [blocks(rng, *matrix) for matrix in matrices]
        return lambda: ops.dense_matmuls(x, ws)
    checks = (product_check(tokens, exact),) * len(matrices)
    return Case("dense_matmuls", f"{what}, {in_words(tokens)}", build, checks, exact)


def _product(what: str, matrix: Matrix, tokens: int, exact: bool, groups: int = 1) -> Case:
    def build(rng: Random) -> Call:
        x, w = normal(rng, tokens, groups * matrix[2]), blocks(rng, *matrix)
        return lambda: [ops.dense_matmul(x, w, groups)]
    return Case("dense_matmul", f"{what}, {in_words(tokens)}", build, (product_check(tokens, exact),), exact)


def _experts(s: Sizes) -> Iterator[Case]:
    c = s.config
    D, F, k = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok

    def gate_up(kind: str, tokens: int, rng: Random) -> Call:
        x = normal(rng, tokens, D, scale=2 * D ** -0.5)    # some reach the limit, most do not
        selected, weight = chosen_experts(rng, tokens, k), mx.abs(normal(rng, tokens, k))
        gate, up = (blocks(rng, kind, EXPERTS, F, D) for _ in range(2))
        shared = blocks(rng, "Q8_0", F, D), blocks(rng, "Q8_0", F, D)
        return lambda: [ops.expert_gate_up(x, selected, weight, gate, up, c.swiglu_limit, shared)]

    def down(kind: str, tokens: int, rng: Random) -> Call:
        mid, selected = normal(rng, tokens, k + 1, F), chosen_experts(rng, tokens, k)
        w, shared = blocks(rng, kind, EXPERTS, D, F), blocks(rng, "Q8_0", D, F)
        return lambda: [ops.expert_down(mid, selected, w, shared)]

    for recipe, (outer, inner) in RECIPES.items():
        for tokens, exact in all_forms(s):
            yield Case("expert_gate_up", f"{recipe}, {in_words(tokens)}", partial(gate_up, outer, tokens),
                       (product_check(tokens, exact, half=4e-3),), exact)     # of two products, then multiplied
            yield Case("expert_down", f"{recipe}, {in_words(tokens)}", partial(down, inner, tokens),
                       (product_check(tokens, exact),), exact)


def _hyper(s: Sizes) -> Iterator[Case]:
    c, N = s.config, s.config.hc_mult
    D, M = c.hidden_size, (2 + N) * N

    def mix(updated: bool, tokens: int, rng: Random) -> Call:
        streams, fn = normal(rng, tokens, N, D), blocks(rng, "F16", M, N * D)
        update = (normal(rng, tokens, D), normal(rng, tokens, N), normal(rng, tokens, N, N)) if updated else None

        def call() -> Sequence[mx.array]:
            after, sums = ops.hyper_mix(streams, fn, update)
            return [after, sums[..., :-1], sums[..., -1:]]      # squares are so much larger than products
        return call

    def sums(columns: int, tokens: int, rng: Random) -> mx.array:
        """As `mix` leaves them, in parts."""
        parts = -(-D // 64)
        products = normal(rng, tokens, parts, columns, scale=(N * D / parts) ** 0.5)
        squares = mx.full((tokens, parts, 1), N * D / parts)
        return mx.concatenate([products, squares], axis=-1)

    def enter(tokens: int, rng: Random) -> Call:
        inputs = (normal(rng, tokens, N, D), sums(M, tokens, rng), normal(rng, 3), normal(rng, M),
                  normal(rng, D, scale=0.1, around=1))
        return lambda: ops.hyper_enter(*inputs, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def leave(tokens: int, rng: Random) -> Call:
        inputs = (normal(rng, tokens, N, D), sums(N, tokens, rng), normal(rng, 1), normal(rng, N),
                  normal(rng, D, scale=0.1, around=1))
        return lambda: [ops.hyper_leave(*inputs, c.hc_eps, c.rms_norm_eps)]

    near = Near(2e-5, FLOAT)
    for tokens in few_and_many(s):
        for updated in (False, True):
            yield Case("hyper_mix", f"{'with' if updated else 'without'} an update, {in_words(tokens)}",
                       partial(mix, updated, tokens), (near, replace(near, parts=True), replace(near, parts=True)))
        yield Case("hyper_enter", in_words(tokens), partial(enter, tokens), (near,) * 3)
    yield Case("hyper_leave", in_words(1), partial(leave, 1), (near,))


def _latent(s: Sizes) -> Iterator[Case]:
    c = s.config
    D, R = c.head_dim, c.qk_rope_head_dim

    def build(tokens: int, held: int, packed: bool, rng: Random) -> Call:
        inputs = (normal(rng, tokens, c.q_lora_rank), normal(rng, tokens, D),
                  normal(rng, c.q_lora_rank, scale=0.1, around=1), normal(rng, D, scale=0.1, around=1),
                  *rope_tables(c, range(s.context, s.context + tokens)),
                  packed_rows(rng, held, D, "fp8" if packed else None, R))
        return lambda: ops.latent(*inputs, packed, c.rms_norm_eps)

    near, full = Near(1e-5, FLOAT), c.sliding_window
    for tokens, held, packed in [(1, 0, True), *((tokens, full, True) for tokens in few_and_many(s)), (1, full, False)]:
        yield Case("latent", f"{in_words(tokens)} behind {held}{'' if packed else ', float32'}",
                   partial(build, tokens, held, packed), (near, Rounded("fp8", D, R) if packed else near))


def _compress(s: Sizes) -> Iterator[Case]:
    """A token that completes no group, one that completes one, a chunk that completes many."""
    c = s.config
    last = s.prefill[-1]
    for what, ratio, width, packing in (("ratio 4", 4, c.head_dim, "fp8"), ("index rows", 4, c.index_head_dim, "fp4"),
                                        ("ratio 128", 128, c.head_dim, "fp8"), ("float32", 4, c.head_dim, None)):
        for start, tokens in ((s.context, 1), (s.context + ratio - 1, 1), (0, last), (s.context + 3, max(last, 130))):
            groups = (start % ratio + tokens) // ratio
            rows = Rounded(packing, width, c.qk_rope_head_dim) if packing else Near(1e-5, FLOAT)
            yield Case("compress_step", f"{what}, {in_words(tokens)} from {start} on",
                       partial(_compressing, c, ratio, width, packing, start, tokens),
                       (Near(1e-6, COPIED), *([rows] if groups else [])))


def _compressing(c: Config, ratio: int, width: int, packing: Packing | None, start: int, tokens: int,
                 rng: Random) -> Call:
    columns = width * (2 if ratio == 4 else 1)
    held = start % ratio + (4 if ratio == 4 and start >= 4 else 0)
    firsts = [group * ratio for group in range(start // ratio, (start + tokens) // ratio)]
    k, s, ape = normal(rng, tokens, columns), normal(rng, tokens, columns), normal(rng, ratio, columns)
    frontier, norm = normal(rng, held, 2, columns), normal(rng, width, scale=0.1, around=1)
    tables = rope_tables(c, firsts)

    def call() -> Sequence[mx.array]:
        frontier_, rows = ops.compress_step(k, s, frontier, ape, norm, *tables, start, ratio, packing, c.rms_norm_eps)
        return [frontier_] if rows is None else [frontier_, rows]
    return call


def _attention(s: Sizes) -> Iterator[Case]:
    c, forms = s.config, list(all_forms(s))
    few = c.index_topk * 4 - max(s.prefill)     # tokens up to which every row of ratio 4 is attended to
    one, last = (s.decode[0], False), (s.prefill[-1], False)
    chunks = [("window only", form, s.context, 0, False) for form in forms]
    chunks += [("window only, from the first token on", form, 0, 0, False) for form in (one, last)]
    chunks += [("all rows of ratio 4", form, few, 4, False) for form in (one, last)]
    chunks += [("all rows of ratio 128", form, s.context, 128, False) for form in forms]
    chunks += [("chosen rows", form, s.context, 4, True) for form in forms]
    for packed in (True, False):
        for what, (tokens, exact), start, ratio, chosen in chunks:
            yield Case("attention", f"{what}, {in_words(tokens)}{'' if packed else ', float32 rows'}",
                       partial(_attending, c, tokens, start, ratio, chosen, packed),
                       (product_check(tokens, exact),), exact)
        chunks = [chunk for chunk in chunks if chunk[0] == "chosen rows" and chunk[1] in (one, last)]


def _attending(c: Config, tokens: int, start: int, ratio: int, chosen: bool, packed: bool, rng: Random) -> Call:
    H, D, R = c.num_attention_heads, c.head_dim, c.qk_rope_head_dim
    packing, end = "fp8" if packed else None, start + tokens
    q, sink = normal(rng, tokens, H * D), normal(rng, H)
    tables = rope_tables(c, range(start, end), ratio > 0)
    window = packed_rows(rng, min(start, c.sliding_window) + tokens, D, packing, R)
    rows = packed_rows(rng, end // ratio, D, packing, R) if ratio else None
    picks = mx.array(np.stack([np.sort(rng.choice(end // ratio, c.index_topk, replace=False)) for _ in range(tokens)])
                     .astype(np.int32)) if chosen else None
    return lambda: [ops.attention(q, *tables, window, start, rows, picks, ratio, sink, c.sliding_window,
                                  c.rms_norm_eps)]


def _indexer(s: Sizes) -> Iterator[Case]:
    c, H, W, R = s.config, s.config.index_n_heads, s.config.index_head_dim, s.config.qk_rope_head_dim
    count = s.context // 4

    def queries(tokens: int, packed: bool, rng: Random) -> Call:
        q, tables = normal(rng, tokens, H, W), rope_tables(c, range(s.context, s.context + tokens))
        return lambda: [ops.index_queries(q, *tables, packed)]

    def scores(tokens: int, packed: bool, rng: Random) -> Call:
        packing = "fp4" if packed else None
        q = packed_rows(rng, tokens * H, W, packing, R).reshape(tokens, H, -1)
        weight, rows = normal(rng, tokens, H), packed_rows(rng, count, W, packing, R)
        return lambda: [ops.index_scores(q, weight, rows, (W * H) ** -0.5)]

    def select(tokens: int, start: int, rng: Random) -> Call:
        scored = mx.array(np.round(rng.standard_normal((tokens, count), np.float32) * 8) / 8)    # with many ties
        positions = mx.array(np.arange(start, start + tokens, dtype=np.int32))
        return lambda: [ops.select_rows(scored, positions, 4, c.index_topk)]

    equal = Equal("scores are given, and of equal ones the lower row wins")
    for packed in (True, False):
        held = "packed" if packed else "float32"
        for tokens in few_and_many(s):
            yield Case("index_queries", f"{held}, {in_words(tokens)}", partial(queries, tokens, packed),
                       (Rounded("fp4", W, R) if packed else Near(1e-6, "ulps of a rotation"),))
            yield Case("index_scores", f"{held}, {count} rows, {in_words(tokens)}", partial(scores, tokens, packed),
                       (Near(1e-5, FLOAT),))
    yield Case("index_scores", f"packed, {count} rows, {in_words(s.prefill[-1])}", partial(scores, s.prefill[-1], True),
               (Near(1e-5, FLOAT),), exact=True)
    for tokens, start in ((1, s.context), (s.prefill[-1], s.context), (s.prefill[-1], 0)):
        yield Case("select_rows", f"{c.index_topk} of {count}, {in_words(tokens)} from {start} on",
                   partial(select, tokens, start), (equal,))


def _route(s: Sizes) -> Iterator[Case]:
    c = s.config
    E, k = c.n_routed_experts, c.num_experts_per_tok

    def scored(tokens: int, rng: Random) -> Call:
        logits = rng.standard_normal((2 * tokens + 16, E))
        bias = rng.standard_normal(E) * 0.1
        best = np.sort(np.sqrt(np.logaddexp(logits, 0)) + bias)[:, ::-1]
        clear = np.argsort(best[:, k] - best[:, k - 1])[:tokens]    # where the last chosen is far above the next
        inputs = mx.array(logits[clear].astype(np.float32)), mx.array(bias.astype(np.float32))
        return lambda: ops.route(*inputs, None, mx.zeros(tokens, mx.int32), k, c.routed_scaling_factor)

    def hashed(tokens: int, rng: Random) -> Call:
        logits, ids = normal(rng, tokens, E), mx.array(rng.integers(0, c.vocab_size, tokens, np.int32))
        table = mx.array(rng.integers(0, E, (c.vocab_size, k), np.int32))
        return lambda: ops.route(logits, None, table, ids, k, c.routed_scaling_factor)

    for tokens in few_and_many(s):
        for what, build in (("by score", scored), ("by token", hashed)):
            yield Case("route", f"{what}, {in_words(tokens)}", partial(build, tokens),
                       (Equal(CLEAR), Near(1e-5, FLOAT)))


def _sample(s: Sizes) -> Iterator[Case]:
    V, likely = s.config.vocab_size, 40

    def build(rank: int, top_k: int, min_p: float, top_p: float, kept: int, rng: Random) -> Call:
        """Tokens each 0.1 below the one before, the rest out of reach, and a draw in the middle of one's share."""
        logits, best = np.full(V, -30, np.float32), rng.choice(V, likely, replace=False)
        logits[best] = -0.1 * np.arange(likely)
        sums = np.cumsum(np.exp(-0.1 * np.arange(kept)))
        uniform, given = float((sums[rank] - np.exp(-0.1 * rank) / 2) / sums[-1]), mx.array(logits)
        how = [np.array([value]) for value in (uniform, 1.0, top_k, min_p, top_p)]
        return lambda: [ops.sample(given[None], *how)]

    for what, cuts, kept in (("nothing cut", (0, 0.0, 1.0), likely), ("min-p", (0, 0.05, 1.0), 30),
                             ("top-k", (20, 0.0, 1.0), 20), ("top-p", (0, 0.0, 0.9), 22)):
        for rank in (0, kept - 1):
            yield Case("sample", f"{what}, the draw of rank {rank}", partial(build, rank, *cuts, kept),
                       (Equal(CLEAR),))
