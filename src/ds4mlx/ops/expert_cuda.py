"""The experts on CUDA: a few tokens straight from their blocks, many sorted by expert and multiplied in tiles."""
import mlx.core as mx

from ds4mlx.cuda_port.forms import CODEBOOK_BYTES, ExpertForm
from ds4mlx.cuda_port.source import Defines
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.ops.card import limits
from ds4mlx.ops.cuda_kernel import kernel
from ds4mlx.ops.dense_matmul import dense_matmul
from ds4mlx.ops.dispatch import exact
from ds4mlx.ops.kernel import Output
from ds4mlx.ops.weights import Blocks

FEW_TOKENS = 32                     # up to here each token reads its experts for itself
THREADS, TILE_THREADS = 512, 256
TILE_ROWS = {1: 128, 0: 256}        # of an expert, for a block: gate and up, or down
STAGES_BYTES = 3 * 16 * 160 * 2     # of x, for 16 vectors of a tile
FEW, MANY, BETWEEN = 0, 1, 2        # forms of expert_matmul.cu
# Between products of many tokens, a block for each row: four numbers at a time.
HALVES = """
auto half = [](float v) { return v > 65504.f ? 65504.f : v < -65504.f ? -65504.f : v; };    // NaN stays
for (int i = threadIdx.x; i < WIDTH / 4; i += blockDim.x) {
    float4 v = from[i];
    __half2 low = __floats2half2_rn(half(v.x), half(v.y)), high = __floats2half2_rn(half(v.z), half(v.w));
    ((uint2*)y)[blockIdx.x * (size_t)(WIDTH / 4) + i] = make_uint2(*(unsigned*)&low, *(unsigned*)&high);
}
"""
OF_ROW = "const float4* from = (const float4*)x + blockIdx.x * (size_t)(WIDTH / 4);"
# Pair p is slot p % SLOTS of token p / SLOTS, behind whose slots is the shared expert.
OF_PAIR = ("int pair = order[blockIdx.x];\n"
           "const float4* from = (const float4*)x + (pair + pair / SLOTS) * (size_t)(WIDTH / 4);")
# mid [T, SLOTS + 1, WIDTH] from the pairs in their places, and the shared expert's of its two products.
MID = """
const int t = blockIdx.x, s = blockIdx.y;
float4* to = (float4*)mid + (t * (size_t)(SLOTS + 1) + s) * (WIDTH / 4);
if (s < SLOTS) {
    const uint2* from = (const uint2*)routed + place[t * SLOTS + s] * (size_t)(WIDTH / 4);
    for (int i = threadIdx.x; i < WIDTH / 4; i += blockDim.x) {
        uint2 v = from[i];
        float2 low = __half22float2(*(__half2*)&v.x), high = __half22float2(*(__half2*)&v.y);
        to[i] = make_float4(low.x, low.y, high.x, high.y);
    }
    return;
}
const size_t row = t * (size_t)WIDTH;
for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) ((float*)to)[i] = ::swiglu(gate[row + i], up[row + i], LIMIT);
"""


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
        [_halves(x, OF_ROW, {}, T, S), order, table, weight, gate.raw, up.raw], [((T * S, F), mx.float16)],
        (F // TILE_ROWS[1], table.shape[0]))
    (mid,) = _between(MID.replace("LIMIT", f"{float(limit)!r}f"), F, S, {
        "routed": mid, "place": place, "gate": dense_matmul(x, shared[0]), "up": dense_matmul(x, shared[1])},
        {"mid": ((T, S + 1, F), mx.float32)}, (T, S + 1))
    return mid


def _down_many(mid, selected, down, shared):
    (T, S), (E, D, _), F = selected.shape, down.shape, mid.shape[2]
    order, place, table, size = _tiles(selected, E)
    pairs = _halves(mid, OF_PAIR, {"order": order}, T * S, S)
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


def _halves(x: mx.array, row: str, chosen: dict[str, mx.array], count: int, slots: int) -> mx.array:
    """`count` rows of x in f16 [count, F], as `row` finds them."""
    width = x.shape[-1]
    (y,) = _between(row + HALVES, width, slots, {"x": x, **chosen}, {"y": ((count, width), mx.float16)}, (count,))
    return y


def _between(text: str, width: int, slots: int, inputs: dict[str, mx.array], outputs: dict[str, Output],
             grid: tuple[int, ...]) -> list[mx.array]:
    """Of rows of `width` numbers, a block each."""
    macros = ("FORM", BETWEEN), ("OUT", "float"), ("WIDTH", width), ("SLOTS", slots)
    return kernel("expert_matmul", text, tuple(inputs), tuple(outputs), macros)(
        list(inputs.values()), list(outputs.values()), grid)


def _macros(w: Blocks, form: int, is_gate_up: int, slots: int, rows: int, width: int) -> Defines:
    return (("FORM", form), ("GATE_UP", is_gate_up), ("KIND", BLOCK_TYPES[w.kind].type_id), ("WIDTH", width),
            ("ROWS", rows), ("SLOTS", slots))
