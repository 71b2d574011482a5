"""Operations over the stand-in, at the shapes of Flash, as on a card with less shared memory than an H200, and when
they let what follows begin.

    python cards.py CARD CPP
"""
import sys
from dataclasses import replace

import cupy as cp
import launches
import numpy as np

from ds4mlx.cuda_port import launch, ops
from ds4mlx.cuda_port.forms import Limits, can_be_arranged, can_be_tiled
from ds4mlx.cuda_port.sizes import Sizes
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import row_bytes
from ds4mlx.models.deepseek_v4.config import FLASH as C

CARDS = {   # limits; whether it is AMD's
    "H200": (Limits(132, 233472, 232448), False), "DGX Spark": (Limits(48, 102400, 101376), False),
    "RTX 5090": (Limits(170, 102400, 101376), False), "Strix Halo": (Limits(40, 65536, 65536), True),
}
D, F, E, S, H = C.hidden_size, C.moe_intermediate_size, C.n_routed_experts, C.num_experts_per_tok, C.num_attention_heads
DENSE = ((("Q8_0", 1024, D), ("Q8_0", 512, D), ("F16", 1024, D), ("F16", 64, D)), 1), \
    ((("Q8_0", H * C.head_dim, 1024), ("F16", 8192, 1024)), 1), ((("Q8_0", 8192, D),), 8), ((("Q8_0", D, 8192),), 1)
SIZES = Sizes.of(C, packed=True)


def zeros(*shape: int, dtype: type = np.float32) -> cp.ndarray:
    return cp.zeros(shape, dtype)


def matrix(kind: str, *shape: int) -> Weight:
    raw = zeros(*shape[:-1], row_bytes(kind, shape[-1]), dtype=np.uint8)
    return Weight(kind, raw, shape, arranged=can_be_arranged(kind, shape))


def between(T: int, step: bool) -> None:
    """What lies between products, of T tokens behind 16,000."""
    of = ops.Connection(matrix("F16", 24, 4 * D), zeros(3), zeros(24), zeros(D), 20, 1e-6, 1e-6)
    update = ops.Update(zeros(T, D), zeros(T, 4), zeros(T, 4, 4), zeros(T, 40))
    x, positions, bound = zeros(T, D), zeros(T, dtype=np.int32), 16_000 + T
    ops.hyper_mix(zeros(T, 4, D), of, update, False, x, step)
    table, chosen = zeros(2, T, SIZES.pairs), zeros(T, C.index_topk, dtype=np.int32)
    pages = zeros(*([T] if step else []), 16, dtype=np.int32)
    rows, index = (zeros(17, 512 * size, dtype=np.uint8) for size in (SIZES.row_bytes, SIZES.index_row_bytes))
    ops.choose_rows(zeros(T, 64 * 128), zeros(T, 64), table, index, pages, positions, bound // 4, chosen, SIZES)
    back = ops.WayBack(of, update) if step else None
    for ratio, most, picked in ((0, 0, None), (4, 512, None), (4, bound // 4, chosen), (128, bound // 128, None)):
        held = ops.Rows(zeros(T, 1 << 20, dtype=np.uint8), 1 << 20, zeros(T, dtype=np.int32),
                        None if step else zeros(T, SIZES.row_bytes, dtype=np.uint8), rows if ratio else None,
                        pages if ratio else None, picked, most)
        ops.attend(zeros(T, H * C.head_dim), table, held, positions, zeros(H), ratio, SIZES, 1e-6, False,
                   zeros(T, H * C.head_dim), back)
    if step:
        ops.route_step(x, matrix("F16", E, D), zeros(E), None, positions, 1.5, zeros(T, S, dtype=np.int32), zeros(T, S),
                       back, False)
        ops.sample(zeros(T, C.vocab_size), zeros(T, C.vocab_size), zeros(T, 4), positions, positions, zeros(T, 2))


def products(T: int, gate: str, down: str) -> None:
    for matrices, groups in DENSE:
        weights = [matrix(*one) for one in matrices]
        ops.dense(zeros(T, groups * weights[0].shape[1]), weights, [zeros(T, w.shape[0]) for w in weights], groups)
    before_the_next_half_layer(T)
    shapes = (gate, (E, F, D)), (gate, (E, F, D)), (down, (E, D, F))
    stacks = [replace(matrix(kind, *shape), tiled=can_be_tiled(*shapes, launch.limits())) for kind, shape in shapes]
    shared = tuple(matrix("Q8_0", *shape) for shape in ((F, D), (F, D), (D, F)))
    ops.experts(zeros(T, D), zeros(T, S, dtype=np.int32), zeros(T, S), *stacks, shared, 10.0, zeros(T, D))
    before_the_next_half_layer(T)


def before_the_next_half_layer(T: int) -> None:
    """A step's hyper-connection reads the streams before its turn."""
    assert T > 16 or launches.holds_its_turn(), f"{launches.latest[0].name} lets it begin too early"


def main() -> None:
    limits, cp.cuda.runtime.is_hip = CARDS[sys.argv[1]]
    launch.limits.cache_clear()
    cp.cuda.Device.attributes = {
        "MultiProcessorCount": limits.processors, "MaxSharedMemoryPerBlock": limits.of_block_bytes,
        "MaxSharedMemoryPerMultiprocessor": limits.of_processor_bytes}
    for T in (1, 2, 4, 5, 8, 16):
        between(T, step=True)
    for T in (17, 300):
        between(T, step=False)
    for kinds in (("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("MXFP4", "MXFP4")):
        for T in (1, 4, 8, 16, 24, 200, 2048):
            products(T, *kinds)
    print(len(launches.launched))


main()
