"""The experts: gate and up with SwiGLU, then down, for those that tokens select and for the shared one."""
import ctypes

import numpy as np

from ds4mlx.cuda_port.build import Defines, kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import BLOCK, CODEBOOK_BYTES, STEP_TOKENS, TABLES_BYTES, ExpertForm, StepForm
from ds4mlx.cuda_port.forms import TILE_ROWS as ROWS
from ds4mlx.cuda_port.launch import launch, limits, processors
from ds4mlx.cuda_port.ops.dense_matmul import dense, dense_encoding, halved, many, plain
from ds4mlx.cuda_port.scratch import take
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import BLOCK_TYPES

FEW_TOKENS = 32                      # up to here each token reads its experts for itself
THREADS = 512
TILE_THREADS, TILE_ROWS = 256, {1: 128, 0: 256}  # rows of an expert for a block: gate and up, or down
STAGES_BYTES = 3 * 16 * 160 * 2      # of x, for 16 vectors of a tile
FEW, MANY, BETWEEN, STEP = 0, 1, 2, 3   # forms of expert_matmul.cu


def experts(x: "cp.ndarray", selected: "cp.ndarray", weight: "cp.ndarray", w1: Weight, w3: Weight, w2: Weight,
            shared: tuple[Weight, Weight, Weight], limit: float, out: "cp.ndarray", quality: bool = False) -> None:
    """out[t] = sum_s W2[e] (weight[t, s] swiglu(W1[e] x[t], W3[e] x[t])), e = selected[t, s], plus the shared expert.

    x f32 [T, D]; selected i32 [T, S]; weight f32 [T, S]; w1, w3 stacks [E, F, D] of one type, w2 [E, D, F]; shared: w1,
    w3, w2 of the shared one; out f32 [T, D]. Few tokens, or any with `quality`, have activations of 16 bits (1e-4 of
    the result); many have halves (1e-3).
    """
    (tokens, slots), rows = selected.shape, w1.shape[1]
    if slots < 2 or not all(w.arranged for w in (w1, w3, w2, *shared)):
        _plain(x, selected, weight, w1, w3, w2, shared, limit, out, quality)
    elif tokens > (STEP_TOKENS if w1.tiled else FEW_TOKENS) and not quality:
        _tiles(x, selected, weight, w1, w3, w2, shared, limit, out)
    elif w1.tiled:
        most = min(STEP_TOKENS, StepForm.gate_up(w1.shape[2], tokens, slots, limits()).tokens,
                   StepForm.down(tokens, slots, limits()).tokens)
        for start in range(0, tokens, most):
            part = slice(start, start + most)
            _step(x[part], selected[part], weight[part], w1, w3, w2, shared, limit, out[part])
    else:
        mid = take("experts.mid", (tokens, slots + 1, rows))
        expert_gate_up(x, selected, weight, w1, w3, shared[:2], limit, mid)
        expert_down(mid, selected, w2, shared[2], out)


def _step(x, selected, weight, w1, w3, w2, shared, limit, out):
    (tokens, slots), (_, rows, width), pairs = selected.shape, w1.shape, selected.size
    gate, up = take("experts.gate", (tokens, rows)), take("experts.up", (tokens, rows))
    planes = take("experts.planes", (STEP_TOKENS, 2, width), np.uint8)  # what is kept of x is kept for 8 or 16 vectors
    scales = take("experts.scales", (STEP_TOKENS, width // BLOCK))
    encoded = dense_encoding(x, list(shared[:2]), [gate, up], planes, scales)
    mid, fields = take("experts.mid", (pairs, 2, rows), np.uint8), take("experts.fields", (pairs, rows // ROWS, 2))
    shared_mid = take("experts.shared", (tokens, 2, rows), np.float16)
    form = StepForm.gate_up(width, tokens, slots, limits())
    launch(kernel("expert_matmul", "gate_up", (*_macros(w1, STEP, 1, slots), *form.defines), form.shared_bytes),
           (rows // ROWS,), (form.threads,),
           [x, planes if encoded else None, scales if encoded else None, selected, weight, w1.raw, w3.raw, gate, up,
            float(limit), tokens, mid, fields, shared_mid], form.shared_bytes)
    form = StepForm.down(tokens, slots, limits())
    launch(kernel("expert_matmul", "down", (*_macros(w2, STEP, 0, slots), *form.defines), form.shared_bytes),
           (width // (2 * ROWS),), (form.threads,),
           [mid, fields, shared_mid, selected, w2.raw, shared[2].raw, tokens, out], form.shared_bytes)


def _tiles(x, selected, weight, w1, w3, w2, shared, limit, out):
    (tokens, slots), (stack, rows, width) = selected.shape, w1.shape
    pairs = tokens * slots
    size = 16 if pairs <= 8 * stack else 32 if pairs <= 20 * stack else 64  # of a tile: few need a second one
    size = max(n for n in (16, 32, 64) if n <= size and _tiles_bytes(w1, n) <= limits().of_block_bytes)
    most = pairs // size + min(stack, pairs)
    order, place = take("experts.order", (pairs,), np.int32), take("experts.place", (pairs,), np.int32)
    table = take("experts.table", (most, 3), np.int32)
    _between("group", (1,), (1024,), [selected, pairs, stack, size, most, order, place, table])
    (x,) = halved(x)
    _shared_many(x, shared, limit, out)
    mid, parts = take("experts.pairs", (pairs, rows), np.float16), take("experts.parts", (pairs, width))
    _launch_tiles(w1, 1, size, most, [x, order, table, weight, w1.raw, w3.raw, float(limit), mid], slots)
    _launch_tiles(w2, 0, size, most, [mid, table, w2.raw, parts], slots)
    _add_slots(parts, place, out, slots)


def _launch_tiles(w: Weight, gate_up: int, size: int, most: int, arguments: list, slots: int) -> None:
    bytes_ = _tiles_bytes(w, size)
    macros = _macros(w, MANY, gate_up, slots) + (("M", size // 16), ("TILED", int(w.tiled)))
    launch(kernel("expert_matmul", "gate_up_tiles" if gate_up else "down_tiles", macros, bytes_),
           (w.shape[1] // TILE_ROWS[gate_up], most), (TILE_THREADS,), arguments, bytes_)


def _tiles_bytes(w: Weight, size: int) -> int:
    """Of shared memory."""
    tables = TABLES_BYTES if w.tiled else CODEBOOK_BYTES
    return tables * (w.kind == "IQ2_XXS") + size // 16 * STAGES_BYTES


def _shared_many(x: "cp.ndarray", shared: tuple[Weight, Weight, Weight], limit: float, out: "cp.ndarray") -> None:
    """out = the shared expert of x f16."""
    tokens, rows = x.shape[0], shared[0].shape[0]
    gate, up = take("experts.gate", (tokens, rows)), take("experts.up", (tokens, rows))
    mid = take("experts.shared", (tokens, rows), np.float16)
    many((x,), shared[0], gate)
    many((x,), shared[1], up)
    _join(gate, up, None, limit, mid)
    many((mid,), shared[2], out)


def _plain(x, selected, weight, w1, w3, w2, shared, limit, out, quality):
    (tokens, slots), rows = selected.shape, w1.shape[1]
    gate, up = take("experts.gate", (tokens * slots, rows)), take("experts.up", (tokens * slots, rows))
    plain(x, w1, gate, selected, slots)
    plain(x, w3, up, selected, slots)
    _join(gate, up, weight, limit, gate)
    parts = take("experts.parts", (tokens * slots, out.shape[1]))
    plain(gate, w2, parts, selected)
    first, second = take("experts.first", (tokens, rows)), take("experts.second", (tokens, rows))
    dense(x, list(shared[:2]), [first, second], quality=quality)
    _join(first, second, None, limit, first)
    dense(first, [shared[2]], [out], quality=quality)
    _add_slots(parts, None, out, slots)


def _join(gate: "cp.ndarray", up: "cp.ndarray", weight: "cp.ndarray | None", limit: float, out: "cp.ndarray") -> None:
    """out f32 or f16 [V, F] = weight[v] swiglu(gate, up)."""
    _between("join", (min(-(-gate.size // 256), 16 * processors()),), (256,),
             [gate, up, weight, float(limit), out, gate.shape[1], ctypes.c_size_t(gate.size)], out.dtype)


def _add_slots(parts: "cp.ndarray", place: "cp.ndarray | None", out: "cp.ndarray", slots: int) -> None:
    """out[t] += the parts of its slots."""
    _between("add_slots", (min(-(-out.size // 1024), 16 * processors()),), (256,),
             [parts, place, out, slots, out.shape[1], ctypes.c_size_t(out.size)])


def _between(entry: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: list,
             dtype: "np.dtype | type" = np.float32) -> None:
    macros = (("FORM", BETWEEN), ("OUT", "__half" if dtype == np.float16 else "float"))
    launch(kernel("expert_matmul", entry, macros), grid, block, arguments)


def expert_gate_up(x: "cp.ndarray", selected: "cp.ndarray", weight: "cp.ndarray", w1: Weight, w3: Weight,
                   shared: tuple[Weight, Weight], limit: float, out: "cp.ndarray") -> None:
    """out[t, s] = weight[t, s] swiglu(W1[e] x[t], W3[e] x[t]), e = selected[t, s]; out[t, S]: the shared one, weight 1.

    x f32 [T, D]; selected i32 [T, S]; weight f32 [T, S]; w1, w3 stacks [E, F, D] of one type; out f32 [T, S + 1, F].
    """
    (tokens, slots), (_, rows, width) = selected.shape, w1.shape
    form = ExpertForm.gate_up(w1.kind, width, tokens, slots, limits())
    macros = (*_macros(w1, FEW, 1, slots), *form.defines)
    launch(kernel("expert_matmul", "gate_up", macros, form.shared_bytes), (form.grid(rows, limits()),), (THREADS,),
           [x, selected, weight, w1.raw, w3.raw, shared[0].raw, shared[1].raw, float(limit), tokens, out],
           form.shared_bytes)


def expert_down(mid: "cp.ndarray", selected: "cp.ndarray", w2: Weight, shared: Weight, out: "cp.ndarray") -> None:
    """out[t] = sum_s W2[selected[t, s]] mid[t, s] + W2shared mid[t, S].

    mid f32 [T, S + 1, F]; w2 a stack [E, D, F]; out f32 [T, D].
    """
    (tokens, slots), (_, rows, width) = selected.shape, w2.shape
    form = ExpertForm.down(w2.kind, width, tokens, slots, limits())
    macros = (*_macros(w2, FEW, 0, slots), *form.defines)
    launch(kernel("expert_matmul", "down", macros, form.shared_bytes), (form.grid(rows, limits()),), (THREADS,),
           [mid, selected, w2.raw, shared.raw, tokens, out], form.shared_bytes)


def _macros(w: Weight, form: int, gate_up: int, slots: int) -> Defines:
    return (("FORM", form), ("GATE_UP", gate_up), ("KIND", BLOCK_TYPES[w.kind].type_id), ("WIDTH", w.shape[2]),
            ("ROWS", w.shape[1]), ("SLOTS", slots))
