"""A case: one call of an op as the graph makes it, on a model's real shapes, and the seeded inputs it is made of."""
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine.mlx_kernel_checks import Check, Near
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


def in_words(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def product_check(tokens: int, exact: bool, half: float = 2e-3) -> Near:
    """For sums of products, which prefill takes in half precision unless it has to be exact."""
    return Near(2e-5, FLOAT) if exact or tokens <= 8 else Near(half, HALF)


def all_forms(s: Sizes) -> Iterator[tuple[int, bool]]:
    """(tokens, exact): all of decode, where exact makes no difference, and of prefill both."""
    yield from ((tokens, False) for tokens in s.decode)
    yield from ((tokens, False) for tokens in s.prefill)
    yield s.prefill[1], True


def few_and_many(s: Sizes) -> tuple[int, ...]:
    """Tokens, for kernels that have one form."""
    return s.decode[0], s.decode[-1], s.prefill[-1]


# ---- inputs

def normal(rng: Random, *shape: int, scale: float = 1.0, around: float = 0.0) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32) * np.float32(scale) + np.float32(around))


def blocks(rng: Random, kind: str, *shape: int) -> ops.Blocks:
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


def packed_rows(rng: Random, count: int, width: int, packing: Packing | None, tail: int) -> mx.array:
    return pack(normal(rng, max(count, 1), width), packing, tail)[:count]


def rope_tables(c: Config, positions: Iterable[int], compressed: bool = True) -> tuple[mx.array, mx.array]:
    cos, sin = rope.tables(np.array(list(positions), np.int64), rope.frequencies(c, compressed))
    return mx.array(cos), mx.array(sin)


def chosen_experts(rng: Random, tokens: int, k: int) -> mx.array:
    """k experts of EXPERTS for each token, ascending."""
    return mx.array(np.sort(rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :k], axis=1).astype(np.int32))
