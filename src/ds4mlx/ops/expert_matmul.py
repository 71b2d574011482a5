"""The experts: gate and up with SwiGLU, then down, for those that a chunk selects and for the shared one."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.ops import expert_cuda, native
from ds4mlx.ops.dense_matmul import dense_matmul
from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.dispatch import exact, pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.weights import Blocks

DECODE_TOKENS = 8  # at most
THREADS = 128    # of a threadgroup
TILE_ROWS = 64   # of a matrix
RUN = 32         # weights that kernels decode together; rows of F16 and F32 may have a rest, in no model
MOST_SLOTS = 14  # of a token, beside the shared expert: decode keeps a slot in a nibble, and 15 stands for none
MOST_EXPERTS = 8192  # that prefill can count in threadgroup memory
GATE_UP = ("gate", "up", "shared_gate", "shared_up", "limit", "tokens")  # inputs of both forms

Product = Callable[[mx.array, Blocks, int], mx.array]


def swiglu(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    """silu(min(gate, limit)) * clamp(up, -limit, limit). The gate has no lower clamp. Any shape, float32."""
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(gate) * mx.clip(up, -limit, limit)


def expert_gate_up(x: mx.array, selected: mx.array, weight: mx.array, gate: Blocks, up: Blocks, limit: float,
                   shared: tuple[Blocks, Blocks] | None = None) -> mx.array:
    """mid[t, s] = weight[t, s] * swiglu(W1[e] x[t], W3[e] x[t]) for e = selected[t, s].

    x [T, D] f32; selected [T, S] i32 in [0, E); weight [T, S] f32; gate, up stacks of [E, F, row bytes], one kind.
    `shared`, gate and up of [F, row bytes], is one more slot that every token takes with weight 1.
    Returns [T, S, F] f32, [T, S + 1, F] with the shared expert. The route weight is applied before the down product,
    as the official code does. Raises ValueError when stacks do not go together.
    """
    _same("expert_gate_up", gate, up)
    if shared:
        _same("expert_gate_up, shared", *shared)
    metal = gate_up_metal if _has_kernels(selected, gate, x.shape[1]) else None
    cuda = expert_cuda.gate_up if expert_cuda.fits(selected, gate, up, *(shared or ())) else None
    run = pick(gate_up_reference, metal=metal, cuda=cuda, native=gate_up_cpu)
    return run(x, selected, weight, gate, up, limit, shared)


def expert_down(mid: mx.array, selected: mx.array, down: Blocks, shared: Blocks | None = None) -> mx.array:
    """y[t] = sum_s W2[selected[t, s]] mid[t, s], plus the shared W2 mid[t, S].

    mid [T, S, F] f32, [T, S + 1, F] with `shared`, which is [D, row bytes]; selected [T, S] i32 in [0, E); down a stack
    of [E, D, row bytes]. Returns [T, D] f32. Raises ValueError when mid has not one row for each slot.
    """
    slots = selected.shape[1] + (shared is not None)
    if mid.shape[1] != slots:
        raise ValueError(f"expert_down: mid {mid.shape} for {slots} slots, selected {selected.shape}, shared: "
                         f"{shared is not None}")
    metal = down_metal if _has_kernels(selected, down, mid.shape[2]) else None
    cuda = expert_cuda.down if expert_cuda.fits(selected, down, *filter(None, [shared])) else None
    return pick(down_reference, metal=metal, cuda=cuda, native=down_cpu)(mid, selected, down, shared)


def _has_kernels(selected: mx.array, stack: Blocks, width: int) -> bool:
    """Of every published model; a file may describe others."""
    return width % RUN == 0 and selected.shape[1] <= MOST_SLOTS and stack.shape[0] <= MOST_EXPERTS


def _same(op: str, gate: Blocks, up: Blocks) -> None:
    if (gate.kind, gate.shape) != (up.kind, up.shape):
        raise ValueError(f"{op}: gate is {gate.kind} {gate.shape}, up {up.kind} {up.shape}; they must be alike")


def gate_up_reference(x, selected, weight, gate, up, limit, shared, product: Product | None = None):
    product = product or _product
    groups, parts = _by_expert(selected), []
    for expert, pairs in groups:
        rows = x[mx.array(pairs // selected.shape[1])]
        parts.append(swiglu(product(rows, gate, expert), product(rows, up, expert), limit))
    mid = _in_order(parts, groups).reshape(*selected.shape, -1) * weight[..., None]
    if shared is None:
        return mid
    last = swiglu(dense_matmul(x, shared[0]), dense_matmul(x, shared[1]), limit)
    return mx.concatenate([mid, last[:, None]], axis=1)


def down_reference(mid, selected, down, shared, product: Product | None = None):
    product, slots = product or _product, selected.shape[1]
    groups, flat = _by_expert(selected), mid[:, :slots].reshape(-1, mid.shape[-1])
    parts = [product(flat[mx.array(pairs)], down, expert) for expert, pairs in groups]
    y = _in_order(parts, groups).reshape(*selected.shape, -1).sum(axis=1)
    return y if shared is None else y + dense_matmul(mid[:, slots], shared)


def gate_up_cpu(x, selected, weight, gate, up, limit, shared):
    last = (shared[0].host(), shared[1].host(), shared[0].kind) if shared else None
    return mx.array(native.gate_up(native.array(x), np.array(selected), native.array(weight), gate.host(), gate.kind,
                                   up.host(), up.kind, limit, last))


def down_cpu(mid, selected, down, shared):
    last = (shared.host(), shared.kind) if shared else None
    return mx.array(native.down(native.array(mid), np.array(selected), down.host(), down.kind, last))


def gate_up_metal(x, selected, weight, gate, up, limit, shared):
    (T, S), (_, F, _), D = selected.shape, gate.shape, x.shape[1]
    common = shared is not None
    last_gate, last_up = shared or (gate, up)  # never read where there is none
    weights = [gate.raw, up.raw, last_gate.raw, last_up.raw, float(limit), T]
    template = [*_sizes(gate, last_gate, S, common), ("D", D), ("F", F)]
    out = [((T, S + common, F), mx.float32)]
    if T <= DECODE_TOKENS:
        split = Split.of(T, F)
        launch = kernel("expert_matmul", "gate_up", ("x", "selected", "weight", *GATE_UP), ("mid",))
        (mid,) = launch([x, selected, weight, *weights], out, (split.groups, T * S + common, 1), (THREADS, 1, 1),
                        [*template, ("ROWS", split.rows), ("M", split.most)])
        return mid
    tiles = Tiles.of(selected, gate.shape[0])
    launch = kernel("expert_matmul", "gate_up_tiles", ("x", "order", "table", "weight", *GATE_UP, "tiles"), ("mid",))
    (mid,) = launch([x, tiles.order, tiles.table, weight, *weights, tiles.most], out,
                    (-(-F // (TILE_ROWS // 2)), tiles.most + common * tiles.shared, 1), (THREADS, 1, 1),
                    [*template, *tiles.template])
    return mid


def down_metal(mid, selected, down, shared):
    (T, S), (_, D, _), F = selected.shape, down.shape, mid.shape[2]
    common, last = shared is not None, shared or down
    template = [*_sizes(down, last, S, common), ("D", D), ("F", F)]
    if T <= DECODE_TOKENS:
        split = Split.of(T, D)
        launch = kernel("expert_matmul", "down", ("mid", "selected", "down", "shared", "tokens"), ("y",))
        (y,) = launch([mid, selected, down.raw, last.raw, T], [((T, D), mx.float32)], (split.groups, 1, 1),
                      (THREADS, 1, 1), [*template, ("ROWS", split.rows), ("M", split.most)])
        return y
    tiles = Tiles.of(selected, down.shape[0])
    launch = kernel("expert_matmul", "down_tiles", ("mid", "order", "table", "down", "shared", "tokens", "tiles"),
                    ("parts",))
    (parts,) = launch([mid, tiles.order, tiles.table, down.raw, last.raw, T, tiles.most],
                      [((T, S + common, D), mx.float32)],
                      (-(-D // TILE_ROWS), tiles.most + common * tiles.shared, 1), (THREADS, 1, 1),
                      [*template, *tiles.template])
    (y,) = kernel("expert_matmul", "add_slots", ("parts", "tokens"), ("y",))(
        [parts, T], [((T, D), mx.float32)], (-(-T * D // 256), 1, 1), (256, 1, 1), [("D", D), ("WIDTH", S + common)])
    return y


def _sizes(routed: Blocks, shared: Blocks, slots: int, common: bool) -> list[tuple[str, int]]:
    return [("KIND", BLOCK_TYPES[routed.kind].type_id), ("SHARED_KIND", BLOCK_TYPES[shared.kind].type_id),
            ("SLOTS", slots), ("SHARED", int(common))]


@dataclass(frozen=True, slots=True)
class Split:
    """How decode shares out the rows of a matrix: `rows` of them to a simdgroup, for up to `most` tokens."""
    most: int
    rows: int
    groups: int

    @classmethod
    def of(cls, tokens: int, rows: int) -> Self:
        most = 1 << (tokens - 1).bit_length()
        each = 4 if most <= 2 else 2  # registers hold a sum for each row and token
        return cls(most, each, -(-rows // (each * THREADS // 32)))


@dataclass(frozen=True, slots=True)
class Tiles:
    """A chunk's pairs, sorted by expert and cut into tiles (`group` in the kernels' file)."""
    order: mx.array    # i32 [pairs]: the pairs of an expert follow one another, in ascending order
    table: mx.array    # i32 [most, 3]: expert, first place in `order`, how many pairs; 0 of them past the last tile
    most: int          # tiles there can be: which experts are chosen is known on the device alone
    shared: int        # tiles of all tokens in turn, for the shared expert
    template: list[tuple[str, int | mx.Dtype]]

    @classmethod
    def of(cls, selected: mx.array, experts: int) -> Self:
        (T, _), pairs = selected.shape, selected.size
        size = 64 if pairs > 24 * experts else 32  # few experts should need a second tile: it decodes again
        most = pairs // size + min(experts, pairs)
        order, table = kernel("expert_matmul", "group", ("selected", "pairs", "tiles"), ("order", "table"))(
            [selected, pairs, most], [((pairs,), mx.int32), ((most, 3), mx.int32)], (1, 1, 1),
            (min(-(-experts // 32) * 32, 1024), 1, 1), [("E", experts), ("TILE", size)])
        real = mx.float32 if exact() else mx.float16
        return cls(order, table, most, -(-T // size), [("S", real), ("BM", size)])


def _by_expert(selected: mx.array) -> list[tuple[int, np.ndarray]]:
    """Each selected expert with its pairs; pair t S + s is token t's slot s."""
    experts = np.array(selected).reshape(-1)
    order = np.argsort(experts, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(experts[order])) + 1)
    return [(int(experts[pairs[0]]), pairs) for pairs in groups]


def _in_order(parts: list[mx.array], groups: list[tuple[int, np.ndarray]]) -> mx.array:
    """One row a pair, from one part a group."""
    order = np.concatenate([pairs for _, pairs in groups])
    return mx.concatenate(parts)[mx.array(np.argsort(order))]


def _product(rows: mx.array, stack: Blocks, expert: int) -> mx.array:
    y = rows @ dequantize(stack.take(expert), stack.kind).T
    mx.eval(y)  # or every decoded expert would be alive at once
    return y
