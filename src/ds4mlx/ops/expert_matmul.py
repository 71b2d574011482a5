"""The routed experts: gate and up with SwiGLU, then down, only for the experts that a chunk selects."""
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ds4mlx.ops import native
from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.weights import Blocks

Product = Callable[[mx.array, Blocks, int], mx.array]


def swiglu(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    """silu(min(gate, limit)) * clamp(up, -limit, limit). The gate has no lower clamp. Any shape, float32."""
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(gate) * mx.clip(up, -limit, limit)


def expert_gate_up(x: mx.array, selected: mx.array, weight: mx.array, gate: Blocks, up: Blocks,
                   limit: float) -> mx.array:
    """mid[t, s] = weight[t, s] * swiglu(W1[e] x[t], W3[e] x[t]) for e = selected[t, s].

    x [T, D] f32; selected [T, S] int in [0, E); weight [T, S] f32; gate, up stacks of [E, F, row bytes].
    Returns [T, S, F] f32. The route weight is applied before the down product, as the official code does.
    """
    return pick(gate_up_reference, native=gate_up_cpu)(x, selected, weight, gate, up, limit)


def expert_down(mid: mx.array, selected: mx.array, down: Blocks) -> mx.array:
    """y[t] = sum_s W2[selected[t, s]] mid[t, s].

    mid [T, S, F] f32; selected [T, S] int; down a stack of [E, D, row bytes]. Returns [T, D] f32.
    """
    return pick(down_reference, native=down_cpu)(mid, selected, down)


def gate_up_reference(x, selected, weight, gate, up, limit, product: Product | None = None):
    product = product or _product
    groups, parts = _by_expert(selected), []
    for expert, pairs in groups:
        rows = x[mx.array(pairs // selected.shape[1])]
        parts.append(swiglu(product(rows, gate, expert), product(rows, up, expert), limit))
    return _in_order(parts, groups).reshape(*selected.shape, -1) * weight[..., None]


def down_reference(mid, selected, down, product: Product | None = None):
    product = product or _product
    groups, flat = _by_expert(selected), mid.reshape(-1, mid.shape[-1])
    parts = [product(flat[mx.array(pairs)], down, expert) for expert, pairs in groups]
    return _in_order(parts, groups).reshape(*selected.shape, -1).sum(axis=1)


def gate_up_cpu(x, selected, weight, gate, up, limit):
    return gate_up_reference(x, selected, weight, gate, up, limit, _cpu_product)


def down_cpu(mid, selected, down):
    return down_reference(mid, selected, down, _cpu_product)


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


def _cpu_product(rows: mx.array, stack: Blocks, expert: int) -> mx.array:
    return mx.array(native.matmul(native.array(rows), stack.host(expert), stack.kind))
