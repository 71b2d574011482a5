"""The experts: gate and up with SwiGLU, then down, for those that tokens select and for the shared one."""

from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch, processors
from ds4mlx.cuda_port.ops.dequantize import LANES, PIECE_WEIGHTS, TEAM
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import BLOCK_TYPES

THREADS = 512
GATE_UP_TOKENS, DOWN_TOKENS = 8, 4   # at a time: what shared memory holds
GATE_UP_ROWS, DOWN_ROWS = 8, 16      # of a team
TABLES_BYTES = 48 * 1024             # the codebook of IQ2_XXS, for each lane its own


def expert_gate_up(x: "cp.ndarray", selected: "cp.ndarray", weight: "cp.ndarray", w1: Weight, w3: Weight,
                   shared: tuple[Weight, Weight], limit: float, out: "cp.ndarray") -> None:
    """out[t, s] = weight[t, s] swiglu(W1[e] x[t], W3[e] x[t]) for e = selected[t, s]; out[t, S]: the shared one, weight 1.

    x f32 [T, D]; selected i32 [T, S]; weight f32 [T, S]; w1, w3 stacks [E, F, D] of one type; out f32 [T, S + 1, F].
    """
    (tokens, slots), (_, rows, width) = selected.shape, w1.shape
    most = min(1 << (tokens - 1).bit_length(), GATE_UP_TOKENS)
    segments = width // PIECE_WEIGHTS[w1.kind] // LANES
    sums = most * slots * GATE_UP_ROWS * 2 * segments + TEAM * most * GATE_UP_ROWS * 2
    bytes_ = _shared_bytes(w1, most, most * slots + most * slots % 2, sums)
    launch(kernel("expert_matmul", "gate_up", _macros(w1, rows, slots, most, 1), bytes_), (_blocks(rows, GATE_UP_ROWS),),
           (THREADS,), [x, selected, weight, w1.raw, w3.raw, shared[0].raw, shared[1].raw, float(limit), tokens, out],
           bytes_)


def expert_down(mid: "cp.ndarray", selected: "cp.ndarray", w2: Weight, shared: Weight, out: "cp.ndarray") -> None:
    """out[t] = sum_s W2[selected[t, s]] mid[t, s] + W2shared mid[t, S].

    mid f32 [T, S + 1, F]; w2 a stack [E, D, F]; out f32 [T, D].
    """
    (tokens, slots), (_, rows, width) = selected.shape, w2.shape
    most = min(1 << (tokens - 1).bit_length(), DOWN_TOKENS)
    segments = width // PIECE_WEIGHTS[w2.kind] // LANES
    sums = most * DOWN_ROWS * segments + TEAM * most * DOWN_ROWS
    bytes_ = _shared_bytes(w2, most * (slots + 1), most * slots + most * slots % 2, sums)
    launch(kernel("expert_matmul", "down", _macros(w2, rows, slots, most, 0), bytes_), (_blocks(rows, DOWN_ROWS),),
           (THREADS,), [mid, selected, w2.raw, shared.raw, tokens, out], bytes_)


def _macros(w: Weight, rows: int, slots: int, most: int, gate_up: int) -> tuple[tuple[str, int], ...]:
    return (("GATE_UP", gate_up), ("KIND", BLOCK_TYPES[w.kind].type_id), ("WIDTH", w.shape[2]), ("ROWS", rows),
            ("SLOTS", slots), ("MOST", most))


def _shared_bytes(w: Weight, vectors: int, experts: int, sums: int) -> int:
    width, tables = w.shape[2], TABLES_BYTES * (w.kind == "IQ2_XXS")
    return tables + vectors * (2 * (width + 64) + width // 256 * 4) + 4 * experts + 2 * 4 * sums


def _blocks(rows: int, of_team: int) -> int:
    return min(-(-rows // (2 * of_team)), processors())
