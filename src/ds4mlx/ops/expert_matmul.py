"""The routed experts: gate and up with SwiGLU, then down, only for the experts that a chunk selects."""
from collections.abc import Callable, Iterator

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
    S = selected.shape[1]
    parts = [swiglu(product(rows, gate, e), product(rows, up, e), limit)
             for e, rows in _by_expert(x, selected, lambda pair: pair // S)]
    return _restore(parts, selected).reshape(*selected.shape, -1) * weight[..., None]


def down_reference(mid, selected, down, product: Product | None = None):
    product = product or _product
    flat = mid.reshape(-1, mid.shape[-1])
    parts = [product(rows, down, e) for e, rows in _by_expert(flat, selected, lambda pair: pair)]
    return _restore(parts, selected).reshape(*selected.shape, -1).sum(axis=1)


def gate_up_cpu(x, selected, weight, gate, up, limit):
    return gate_up_reference(x, selected, weight, gate, up, limit, _cpu_product)


def down_cpu(mid, selected, down):
    return down_reference(mid, selected, down, _cpu_product)


def _by_expert(x: mx.array, selected: mx.array,
               row_of: Callable[[np.ndarray], np.ndarray]) -> Iterator[tuple[int, mx.array]]:
    """Each selected expert with the rows of x that go to it; a (token, slot) pair reads row `row_of(pair)`."""
    experts = np.array(selected).reshape(-1)
    order = np.argsort(experts, kind="stable")
    for pairs in np.split(order, np.flatnonzero(np.diff(experts[order])) + 1):
        yield int(experts[pairs[0]]), x[mx.array(row_of(pairs))]


def _restore(parts: list[mx.array], selected: mx.array) -> mx.array:
    """Rows in expert order back to the order of their (token, slot) pairs."""
    order = np.argsort(np.array(selected).reshape(-1), kind="stable")
    return mx.concatenate(parts)[mx.array(np.argsort(order))]


def _product(rows: mx.array, stack: Blocks, expert: int) -> mx.array:
    y = rows @ dequantize(stack.take(expert), stack.kind).T
    mx.eval(y)  # or every decoded expert would be alive at once
    return y


def _cpu_product(rows: mx.array, stack: Blocks, expert: int) -> mx.array:
    return mx.array(native.matmul(native.array(rows), stack.host(expert), stack.kind))
