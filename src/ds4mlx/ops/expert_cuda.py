"""The experts on CUDA: a few tokens straight from their blocks, many sorted by expert and multiplied in tiles."""
import mlx.core as mx

from ds4mlx.cuda_port.forms import CODEBOOK_BYTES, ExpertForm
from ds4mlx.cuda_port.source import Defines
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.ops.card import limits
from ds4mlx.ops.cuda_kernel import kernel
from ds4mlx.ops.dense_matmul import dense_matmul
from ds4mlx.ops.dispatch import exact
from ds4mlx.ops.weights import Blocks

FEW_TOKENS = 32                     # up to here each token reads its experts for itself
THREADS, TILE_THREADS = 512, 256
TILE_ROWS = {1: 128, 0: 256}        # of an expert, for a block: gate and up, or down
STAGES_BYTES = 3 * 16 * 160 * 2     # of x, for 16 vectors of a tile
FEW, MANY, BETWEEN = 0, 1, 2        # forms of expert_matmul.cu
HALF_MAX = 65504.0


def fits(selected: mx.array, *stacks: Blocks) -> bool:
    """Whether there are kernels: for two slots at least, a shared expert, and rows that are arranged."""
    return selected.shape[0] > 0 and selected.shape[1] > 1 and len(stacks) % 2 == 0 and all(w.arranged for w in stacks)


def gate_up(x, selected, weight, gate, up, limit, shared):
    if selected.shape[0] > FEW_TOKENS and not exact() and gate.shape[1] % TILE_ROWS[1] == 0:
        return _gate_up_many(x, selected, weight, gate, up, limit, shared)
    (T, S), (_, F, _), D = selected.shape, gate.shape, x.shape[1]
    form = ExpertForm.gate_up(gate.kind, D, T, S, limits())
    call = ("::gate_up(x, selected, weight, gate, up, shared_gate, shared_up, "
            f"{float(limit)!r}f, selected_shape[0], mid);")
    (mid,) = kernel("expert_matmul", call, ("x", "selected", "weight", "gate", "up", "shared_gate", "shared_up"),
                    ("mid",), (*_macros(gate, FEW, 1, S, F, D), *form.defines), THREADS, 1, form.shared_bytes)(
        [x, selected, weight, gate.raw, up.raw, shared[0].raw, shared[1].raw], [((T, S + 1, F), mx.float32)],
        (form.grid(F, limits()),))
    return mid


def down(mid, selected, down, shared):
    if selected.shape[0] > FEW_TOKENS and not exact() and down.shape[1] % TILE_ROWS[0] == 0:
        return _down_many(mid, selected, down, shared)
    (T, S), (_, D, _), F = selected.shape, down.shape, mid.shape[2]
    form = ExpertForm.down(down.kind, F, T, S, limits())
    (y,) = kernel("expert_matmul", "::down(mid, selected, matrix, shared_matrix, selected_shape[0], y);",
                  ("mid", "selected", "matrix", "shared_matrix"), ("y",),
                  (*_macros(down, FEW, 0, S, D, F), *form.defines), THREADS, 1, form.shared_bytes)(
        [mid, selected, down.raw, shared.raw], [((T, D), mx.float32)], (form.grid(D, limits()),))
    return y


def _gate_up_many(x, selected, weight, gate, up, limit, shared):
    (T, S), (E, F, _), D = selected.shape, gate.shape, x.shape[1]
    order, place, table, size = _tiles(selected, E)
    call = f"::gate_up_tiles(x, order, (const Tile*)table, weight, gate, up, {float(limit)!r}f, mid);"
    bytes_ = _tile_bytes(gate, size)
    (mid,) = kernel("expert_matmul", call, ("x", "order", "table", "weight", "gate", "up"), ("mid",),
                    (*_macros(gate, MANY, 1, S, F, D), ("M", size // 16)), TILE_THREADS, 2, bytes_)(
        [_halves(x), order, table, weight, gate.raw, up.raw], [((T * S, F), mx.float16)],
        (F // TILE_ROWS[1], table.shape[0]))
    first, second = dense_matmul(x, shared[0]), dense_matmul(x, shared[1])
    (last,) = kernel("expert_matmul", f"::join(a, b, 0, {float(limit)!r}f, mid, a_shape[1], "
                     "(size_t)a_shape[0] * a_shape[1]);", ("a", "b"), ("mid",),
                     (("FORM", BETWEEN), ("OUT", "float")))(
        [first, second], [((T, F), mx.float32)], (min(-(-T * F // 256), 16 * limits().processors),))
    routed = mid[place].astype(mx.float32).reshape(T, S, F)
    return mx.concatenate([routed, last[:, None]], axis=1)


def _down_many(mid, selected, down, shared):
    (T, S), (E, D, _), F = selected.shape, down.shape, mid.shape[2]
    order, place, table, size = _tiles(selected, E)
    pairs = _halves(mid[:, :S].reshape(T * S, F))[order]
    (parts,) = kernel("expert_matmul", "::down_tiles(mid, (const Tile*)table, matrix, parts);",
                      ("mid", "table", "matrix"), ("parts",), (*_macros(down, MANY, 0, S, D, F), ("M", size // 16)),
                      TILE_THREADS, 2, _tile_bytes(down, size))(
        [pairs, table, down.raw], [((T * S, D), mx.float32)], (D // TILE_ROWS[0], table.shape[0]))
    # Each thread copies what it will add to.
    call = ("size_t count = (size_t)base_shape[0] * base_shape[1];\n"
            "for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count / 4; i += (size_t)gridDim.x * "
            "blockDim.x) ((float4*)y)[i] = ((const float4*)base)[i];\n"
            "::add_slots(parts, place, y, place_shape[0] / base_shape[0], base_shape[1], count);")
    (y,) = kernel("expert_matmul", call, ("parts", "place", "base"), ("y",), (("FORM", BETWEEN), ("OUT", "float")))(
        [parts, place, dense_matmul(mid[:, S], shared)], [((T, D), mx.float32)],
        (min(-(-T * D // 1024), 16 * limits().processors),))
    return y


def _tiles(selected: mx.array, experts: int) -> tuple[mx.array, mx.array, mx.array, int]:
    """Pairs by expert: order i32 [pairs], where each pair is in it, tiles i32 [most, 3], and pairs of a tile."""
    pairs = selected.size
    size = 16 if pairs <= 8 * experts else 32 if pairs <= 20 * experts else 64  # few need a second tile
    most = pairs // size + min(experts, pairs)
    call = (f"::group(selected, selected_shape[0] * selected_shape[1], {experts}, {size}, selected_shape[0] * "
            f"selected_shape[1] / {size} + min({experts}, selected_shape[0] * selected_shape[1]), order, place, "
            "(Tile*)table);")
    order, place, table = kernel("expert_matmul", call, ("selected",), ("order", "place", "table"),
                                 (("FORM", BETWEEN), ("OUT", "float")), 1024)(
        [selected], [((pairs,), mx.int32), ((pairs,), mx.int32), ((most, 3), mx.int32)], (1,))
    return order, place, table, size


def _tile_bytes(w: Blocks, size: int) -> int:
    return CODEBOOK_BYTES * (w.kind == "IQ2_XXS") + size // 16 * STAGES_BYTES


def _halves(x: mx.array) -> mx.array:
    return mx.clip(x, -HALF_MAX, HALF_MAX).astype(mx.float16)


def _macros(w: Blocks, form: int, is_gate_up: int, slots: int, rows: int, width: int) -> Defines:
    return (("FORM", form), ("GATE_UP", is_gate_up), ("KIND", BLOCK_TYPES[w.kind].type_id), ("WIDTH", width),
            ("ROWS", rows), ("SLOTS", slots))
