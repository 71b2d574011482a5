"""What every kernel is tried on: each op as the graph calls it, on a model's real shapes and seeded random inputs.

Decode and prefill have kernels of their own, and their variants by tokens and types are compiled apart, so each is a
case. Stacks hold a few experts, which lie as those of a whole layer do.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine.mlx_kernel_checks import Check, Equal, Near, Rounded
from ds4mlx.engine.mlx_plan import RECIPES
from ds4mlx.gguf.blocks import BLOCK_TYPES, row_bytes
from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import FLASH, Config
from ds4mlx.ops.kv_round import Packing, pack

Random = np.random.Generator
Call = Callable[[], Sequence[mx.array]]

FLOAT = "float32 sums in another order"
HALF = "factors rounded to half, 2^-11 each"
COPIED = "copies, and a sum of two numbers"
CLEAR = "no choice is so close that rounding decides it"
EXPERTS = 8     # of a stack, of which a token takes num_experts_per_tok
# The high byte of each half-precision scale of a block, for weights of about unit size.
SCALES = {"Q8_0": (1,), "Q2_K": (81, 83), "Q4_K": (1, 3), "IQ2_XXS": (1,)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are."""
    config: Config
    decode: tuple[int, ...]     # tokens of a chunk; kernels hold 1, 2, 4 or 8 in registers
    prefill: tuple[int, ...]    # tokens; tiles are of 32 or 64
    context: int                # tokens before the chunk, where compressed rows are attended to or scored


SIZES = {
    "flash": Sizes(FLASH, (1, 2, 4, 8), (16, 64, 512), 131072),
    "small": Sizes(replace(
        FLASH, vocab_size=2048, hidden_size=512, num_attention_heads=16, head_dim=128, q_lora_rank=256, o_groups=2,
        o_lora_rank=128, index_n_heads=8, index_topk=16, n_routed_experts=32, moe_intermediate_size=256),
        (1, 3), (16, 40), 1024),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op. `build` makes its inputs and returns the call; `checks` go with its outputs, in order."""
    op: str
    what: str
    build: Callable[[Random], Call]
    checks: tuple[Check, ...]
    exact: bool = False     # as under --quality

    @property
    def name(self) -> str:
        return f"{self.op}: {self.what}{', exact' if self.exact else ''}"


def cases(s: Sizes) -> Iterator[Case]:
    """All of them, op by op."""
    for of_op in (_dequantize, _dense, _experts, _hyper, _latent, _compress, _attention, _indexer, _route, _sample):
        yield from of_op(s)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _near(tokens: int, exact: bool, half: float = 2e-3) -> Near:
    """For sums of products, which prefill takes in half precision unless it has to be exact."""
    return Near(2e-5, FLOAT) if exact or tokens <= 8 else Near(half, HALF)


def _forms(s: Sizes) -> Iterator[tuple[int, bool]]:
    """(tokens, exact): all of decode, where exact makes no difference, and of prefill both."""
    yield from ((tokens, False) for tokens in s.decode)
    yield from ((tokens, False) for tokens in s.prefill)
    yield s.prefill[1], True


def _ends(s: Sizes) -> tuple[int, ...]:
    """Tokens, for kernels that have one form."""
    return s.decode[0], s.decode[-1], s.prefill[-1]


# ---- inputs

def _normal(rng: Random, *shape: int, scale: float = 1.0, around: float = 0.0) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(around))


def _blocks(rng: Random, kind: str, *shape: int) -> ops.Blocks:
    """A matrix, or a stack of them, of finite weights of about unit size."""
    if kind in ("F32", "F16", "BF16"):
        bits = rng.standard_normal(shape, np.float32)
        raw = bits.astype(np.float16) if kind == "F16" else bits.view(np.uint16)[..., 1::2] if kind == "BF16" else bits
        return ops.Blocks(mx.array(np.ascontiguousarray(raw).view(np.uint8)), kind)
    raw = rng.integers(0, 256, (*shape[:-1], row_bytes(kind, shape[-1])), np.uint8)
    blocks = raw.reshape(-1, BLOCK_TYPES[kind].bytes)
    for high in SCALES.get(kind, ()):
        blocks[:, high] = 0x20 + blocks[:, high] % 8    # 2^-7 to 2^-5
    if kind == "MXFP4":
        blocks[:, 0] = 124 + blocks[:, 0] % 4           # exponents, over 127
    return ops.Blocks(mx.array(raw), kind)


def _rows(rng: Random, count: int, width: int, packing: Packing | None, tail: int) -> mx.array:
    return pack(_normal(rng, max(count, 1), width), packing, tail)[:count]


def _tables(c: Config, positions: Iterable[int], compressed: bool = True) -> tuple[mx.array, mx.array]:
    cos, sin = rope.tables(np.array(list(positions), np.int64), rope.frequencies(c, compressed))
    return mx.array(cos), mx.array(sin)


def _selected(rng: Random, tokens: int, k: int) -> mx.array:
    """k experts of EXPERTS for each token, ascending."""
    return mx.array(np.sort(rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :k], axis=1).astype(np.int32))


# ---- cases of each op

def _dequantize(s: Sizes) -> Iterator[Case]:
    def build(kind: str, rng: Random) -> Call:
        w = _blocks(rng, kind, 512, s.config.hidden_size)
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
    for tokens, exact in _forms(s):
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
        x = _normal(rng, tokens, matrices[0][2])
        ws = [_blocks(rng, *matrix) for matrix in matrices]
        return lambda: ops.dense_matmuls(x, ws)
    checks = (_near(tokens, exact),) * len(matrices)
    return Case("dense_matmuls", f"{what}, {_tokens(tokens)}", build, checks, exact)


def _product(what: str, matrix: Matrix, tokens: int, exact: bool, groups: int = 1) -> Case:
    def build(rng: Random) -> Call:
        x, w = _normal(rng, tokens, groups, matrix[2]), _blocks(rng, *matrix)
        x = x if groups > 1 else x[:, 0]
        return lambda: [ops.dense_matmul(x, w, groups)]
    return Case("dense_matmul", f"{what}, {_tokens(tokens)}", build, (_near(tokens, exact),), exact)


def _experts(s: Sizes) -> Iterator[Case]:
    c = s.config
    D, F, k = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok

    def gate_up(kind: str, tokens: int, rng: Random) -> Call:
        x = _normal(rng, tokens, D, scale=2 * D ** -0.5)    # some reach the limit, most do not
        selected, weight = _selected(rng, tokens, k), mx.abs(_normal(rng, tokens, k))
        gate, up = (_blocks(rng, kind, EXPERTS, F, D) for _ in range(2))
        shared = _blocks(rng, "Q8_0", F, D), _blocks(rng, "Q8_0", F, D)
        return lambda: [ops.expert_gate_up(x, selected, weight, gate, up, c.swiglu_limit, shared)]

    def down(kind: str, tokens: int, rng: Random) -> Call:
        mid, selected = _normal(rng, tokens, k + 1, F), _selected(rng, tokens, k)
        w, shared = _blocks(rng, kind, EXPERTS, D, F), _blocks(rng, "Q8_0", D, F)
        return lambda: [ops.expert_down(mid, selected, w, shared)]

    for recipe, (outer, inner) in RECIPES.items():
        for tokens, exact in _forms(s):
            yield Case("expert_gate_up", f"{recipe}, {_tokens(tokens)}", partial(gate_up, outer, tokens),
                       (_near(tokens, exact, half=4e-3),), exact)     # of two products, which are then multiplied
            yield Case("expert_down", f"{recipe}, {_tokens(tokens)}", partial(down, inner, tokens),
                       (_near(tokens, exact),), exact)


def _hyper(s: Sizes) -> Iterator[Case]:
    c, N = s.config, s.config.hc_mult
    D, M = c.hidden_size, (2 + N) * N

    def mix(updated: bool, tokens: int, rng: Random) -> Call:
        streams, fn = _normal(rng, tokens, N, D), _blocks(rng, "F16", M, N * D)
        update = (_normal(rng, tokens, D), _normal(rng, tokens, N), _normal(rng, tokens, N, N)) if updated else None

        def call() -> Sequence[mx.array]:
            after, sums = ops.hyper_mix(streams, fn, update)
            return [after, sums[..., :-1], sums[..., -1:]]      # squares are so much larger than products
        return call

    def sums(columns: int, tokens: int, rng: Random) -> mx.array:
        """As `mix` leaves them, in parts."""
        parts = -(-D // 64)
        products = _normal(rng, tokens, parts, columns, scale=(N * D / parts) ** 0.5)
        squares = mx.full((tokens, parts, 1), N * D / parts)
        return mx.concatenate([products, squares], axis=-1)

    def enter(tokens: int, rng: Random) -> Call:
        inputs = (_normal(rng, tokens, N, D), sums(M, tokens, rng), _normal(rng, 3), _normal(rng, M),
                  _normal(rng, D, scale=0.1, around=1))
        return lambda: ops.hyper_enter(*inputs, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def leave(tokens: int, rng: Random) -> Call:
        inputs = (_normal(rng, tokens, N, D), sums(N, tokens, rng), _normal(rng, 1), _normal(rng, N),
                  _normal(rng, D, scale=0.1, around=1))
        return lambda: [ops.hyper_leave(*inputs, c.hc_eps, c.rms_norm_eps)]

    near = Near(2e-5, FLOAT)
    for tokens in _ends(s):
        for updated in (False, True):
            yield Case("hyper_mix", f"{'with' if updated else 'without'} an update, {_tokens(tokens)}",
                       partial(mix, updated, tokens), (near, replace(near, parts=True), replace(near, parts=True)))
        yield Case("hyper_enter", _tokens(tokens), partial(enter, tokens), (near,) * 3)
    yield Case("hyper_leave", _tokens(1), partial(leave, 1), (near,))


def _latent(s: Sizes) -> Iterator[Case]:
    c = s.config
    D, R = c.head_dim, c.qk_rope_head_dim

    def build(tokens: int, held: int, packed: bool, rng: Random) -> Call:
        inputs = (_normal(rng, tokens, c.q_lora_rank), _normal(rng, tokens, D),
                  _normal(rng, c.q_lora_rank, scale=0.1, around=1), _normal(rng, D, scale=0.1, around=1),
                  *_tables(c, range(s.context, s.context + tokens)),
                  _rows(rng, held, D, "fp8" if packed else None, R))
        return lambda: ops.latent(*inputs, packed, c.rms_norm_eps)

    near, full = Near(1e-5, FLOAT), c.sliding_window
    for tokens, held, packed in [(1, 0, True), *((tokens, full, True) for tokens in _ends(s)), (1, full, False)]:
        yield Case("latent", f"{_tokens(tokens)} behind {held}{'' if packed else ', float32'}",
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
            yield Case("compress_step", f"{what}, {_tokens(tokens)} from {start} on",
                       partial(_compressing, c, ratio, width, packing, start, tokens),
                       (Near(1e-6, COPIED), *([rows] if groups else [])))


def _compressing(c: Config, ratio: int, width: int, packing: Packing | None, start: int, tokens: int,
                 rng: Random) -> Call:
    columns = width * (2 if ratio == 4 else 1)
    held = start % ratio + (4 if ratio == 4 and start >= 4 else 0)
    firsts = [group * ratio for group in range(start // ratio, (start + tokens) // ratio)]
    k, s, ape = _normal(rng, tokens, columns), _normal(rng, tokens, columns), _normal(rng, ratio, columns)
    frontier, norm = _normal(rng, held, 2, columns), _normal(rng, width, scale=0.1, around=1)
    tables = _tables(c, firsts)

    def call() -> Sequence[mx.array]:
        frontier_, rows = ops.compress_step(k, s, frontier, ape, norm, *tables, start, ratio, packing, c.rms_norm_eps)
        return [frontier_] if rows is None else [frontier_, rows]
    return call


def _attention(s: Sizes) -> Iterator[Case]:
    c, forms = s.config, list(_forms(s))
    few = c.index_topk * 4 - max(s.prefill)     # tokens up to which every row of ratio 4 is attended to
    one, last = (s.decode[0], False), (s.prefill[-1], False)
    chunks = [("window only", form, s.context, 0, False) for form in forms]
    chunks += [("window only, from the first token on", form, 0, 0, False) for form in (one, last)]
    chunks += [("all rows of ratio 4", form, few, 4, False) for form in (one, last)]
    chunks += [("all rows of ratio 128", form, s.context, 128, False) for form in forms]
    chunks += [("chosen rows", form, s.context, 4, True) for form in forms]
    for packed in (True, False):
        for what, (tokens, exact), start, ratio, chosen in chunks:
            yield Case("attention", f"{what}, {_tokens(tokens)}{'' if packed else ', float32 rows'}",
                       partial(_attending, c, tokens, start, ratio, chosen, packed),
                       (_near(tokens, exact),), exact)
        chunks = [chunk for chunk in chunks if chunk[0] == "chosen rows" and chunk[1] in (one, last)]


def _attending(c: Config, tokens: int, start: int, ratio: int, chosen: bool, packed: bool, rng: Random) -> Call:
    H, D, R = c.num_attention_heads, c.head_dim, c.qk_rope_head_dim
    packing, end = "fp8" if packed else None, start + tokens
    q, sink = _normal(rng, tokens, H * D), _normal(rng, H)
    tables = _tables(c, range(start, end), ratio > 0)
    window = _rows(rng, min(start, c.sliding_window) + tokens, D, packing, R)
    rows = _rows(rng, end // ratio, D, packing, R) if ratio else None
    picks = mx.array(np.stack([np.sort(rng.choice(end // ratio, c.index_topk, replace=False)) for _ in range(tokens)])
                     .astype(np.int32)) if chosen else None
    return lambda: [ops.attention(q, *tables, window, start, rows, picks, ratio, sink, c.sliding_window,
                                  c.rms_norm_eps)]


def _indexer(s: Sizes) -> Iterator[Case]:
    c, H, W, R = s.config, s.config.index_n_heads, s.config.index_head_dim, s.config.qk_rope_head_dim
    count = s.context // 4

    def queries(tokens: int, packed: bool, rng: Random) -> Call:
        q, tables = _normal(rng, tokens, H, W), _tables(c, range(s.context, s.context + tokens))
        return lambda: [ops.index_queries(q, *tables, packed)]

    def scores(tokens: int, packed: bool, rng: Random) -> Call:
        packing = "fp4" if packed else None
        q = _rows(rng, tokens * H, W, packing, R).reshape(tokens, H, -1)
        weight, rows = _normal(rng, tokens, H), _rows(rng, count, W, packing, R)
        return lambda: [ops.index_scores(q, weight, rows, (W * H) ** -0.5)]

    def select(tokens: int, start: int, rng: Random) -> Call:
        scored = mx.array(np.round(rng.standard_normal((tokens, count), np.float32) * 8) / 8)    # with many ties
        positions = mx.array(np.arange(start, start + tokens, dtype=np.int32))
        return lambda: [ops.select_rows(scored, positions, 4, c.index_topk)]

    equal = Equal("scores are given, and of equal ones the lower row wins")
    for packed in (True, False):
        held = "packed" if packed else "float32"
        for tokens in _ends(s):
            yield Case("index_queries", f"{held}, {_tokens(tokens)}", partial(queries, tokens, packed),
                       (Rounded("fp4", W, R) if packed else Near(1e-6, "ulps of a rotation"),))
            yield Case("index_scores", f"{held}, {count} rows, {_tokens(tokens)}", partial(scores, tokens, packed),
                       (Near(1e-5, FLOAT),))
    yield Case("index_scores", f"packed, {count} rows, {_tokens(s.prefill[-1])}", partial(scores, s.prefill[-1], True),
               (Near(1e-5, FLOAT),), exact=True)
    for tokens, start in ((1, s.context), (s.prefill[-1], s.context), (s.prefill[-1], 0)):
        yield Case("select_rows", f"{c.index_topk} of {count}, {_tokens(tokens)} from {start} on",
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
        logits, ids = _normal(rng, tokens, E), mx.array(rng.integers(0, c.vocab_size, tokens, np.int32))
        table = mx.array(rng.integers(0, E, (c.vocab_size, k), np.int32))
        return lambda: ops.route(logits, None, table, ids, k, c.routed_scaling_factor)

    for tokens in _ends(s):
        for what, build in (("by score", scored), ("by token", hashed)):
            yield Case("route", f"{what}, {_tokens(tokens)}", partial(build, tokens), (Equal(CLEAR), Near(1e-5, FLOAT)))


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
