"""The experts: gate and up with SwiGLU, then down, for those that a chunk selects and for the shared one."""
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ds4mlx.ops import native
from ds4mlx.ops.dense_matmul import dense_matmul
from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.weights import Blocks

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
    return pick(gate_up_reference, native=gate_up_cpu)(x, selected, weight, gate, up, limit, shared)


def expert_down(mid: mx.array, selected: mx.array, down: Blocks, shared: Blocks | None = None) -> mx.array:
    """y[t] = sum_s W2[selected[t, s]] mid[t, s], plus the shared W2 mid[t, S].

    mid [T, S, F] f32, [T, S + 1, F] with `shared`, which is [D, row bytes]; selected [T, S] i32 in [0, E); down a stack
    of [E, D, row bytes]. Returns [T, D] f32. Raises ValueError when mid has not one row for each slot.
    """
    slots = selected.shape[1] + (shared is not None)
    if mid.shape[1] != slots:
        raise ValueError(f"expert_down: mid {mid.shape} for {slots} slots, selected {selected.shape}, shared: "
                         f"{shared is not None}")
    return pick(down_reference, native=down_cpu)(mid, selected, down, shared)


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
