"""Hyper-connections: the four residual streams mixed into one layer input, and the layer's output mixed back."""
from collections.abc import Callable

import mlx.core as mx

from ds4mlx.ops import hyper_cuda, native, native_step
from ds4mlx.ops.dense_matmul import dense_matmul
from ds4mlx.ops.dense_matmul import reference as dense_reference
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.weights import Blocks

CHANNELS = 64    # of each stream a threadgroup, two a lane
TOKENS = 32      # at most a threadgroup of `hyper_mix`, which reads its part of fn once for them
COLLAPSED = 8    # channels a thread, on the way to a layer's input
NUMBERS = {"F16": mx.float16, "F32": mx.float32, "BF16": mx.uint16}  # as kernels read them: BF16 by its bits

Update = tuple[mx.array, mx.array, mx.array]
Product = Callable[[mx.array, Blocks], mx.array]


def hyper_mix(streams: mx.array, fn: Blocks, update: Update | None = None) -> tuple[mx.array, mx.array]:
    """The half layer before mixed back into the streams, and what the next one needs to know of all of them.

    streams [T, N, D] f32; fn of [M, N D], F16, F32 or BF16; update = (y [T, D], post [T, N], m [T, N, N]), all f32:
    streams'[t, j] = post[t, j] y[t] + sum_i m[t, i, j] streams[t, i], or the streams as they are without one.
    Returns streams' [T, N, D] and sums [T, P, M + 1], to be added up over P: the M products of fn with the N D numbers
    of streams'[t], stream 0 first, and last the sum of their squares.
    Raises ValueError for weights of another type or shape.
    """
    width = streams.shape[1] * streams.shape[2]
    if fn.kind not in NUMBERS or fn.shape[-1] != width * NUMBERS[fn.kind].size:
        raise ValueError(f"hyper_mix: fn is {fn.kind} in rows of {fn.shape[-1]} bytes, need {' or '.join(NUMBERS)}, "
                         f"{width} a row")
    return pick(mix_reference, metal=mix_metal if _has_kernels(streams) else None, native=mix_cpu)(streams, fn, update)


def hyper_enter(streams: mx.array, sums: mx.array, scale: mx.array, base: mx.array, norm: mx.array, iterations: int,
                hc_eps: float, norm_eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """The half layer's input x, normalised, and (post, m) for the `update` that will mix its output back.

    streams [T, N, D] and sums [T, P, 2N + N*N + 1] of `hyper_mix`; scale [3]; base [2N + N*N]; norm [D]; all f32.
    mix = products / rms of the streams, over all N D numbers. Slots: N pre, N post, then an N x N matrix, row = source
    stream. Returns x [T, D] = rms(sum_n pre[n] streams[n]) norm; post [T, N]; m [T, N, N], made doubly stochastic by
    `iterations` Sinkhorn rounds, the first of them over columns only (39 normalisations for 20).
    """
    metal = enter_metal if _has_kernels(streams) else None
    run = pick(enter_reference, metal=metal, native=enter_cpu)
    return run(streams, sums, scale, base, norm, iterations, hc_eps, norm_eps)


def hyper_leave(streams: mx.array, sums: mx.array, scale: mx.array, base: mx.array, norm: mx.array, hc_eps: float,
                norm_eps: float) -> mx.array:
    """The output matrix's input x [T, D] = rms(sum_n (sigmoid(mix[n] scale + base[n]) + hc_eps) streams[n]) norm.

    As `hyper_enter`, with sums [T, P, N + 1], scale [1], base [N].
    """
    metal = leave_metal if _has_kernels(streams) else None
    return pick(leave_reference, metal=metal, native=leave_cpu)(streams, sums, scale, base, norm, hc_eps, norm_eps)


def hyper_input(streams: mx.array, fn: Blocks, update: Update | None, scale: mx.array, base: mx.array, norm: mx.array,
                iterations: int, hc_eps: float, norm_eps: float) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """`hyper_mix`, then `hyper_enter`: x, the streams, post and m; on CUDA in one pass over the streams."""
    cuda = hyper_cuda.enter if hyper_cuda.fits(streams, fn) else None
    return pick(_mix_and_enter, cuda=cuda)(streams, fn, update, scale, base, norm, iterations, hc_eps, norm_eps)


def hyper_output(streams: mx.array, fn: Blocks, update: Update | None, scale: mx.array, base: mx.array, norm: mx.array,
                 hc_eps: float, norm_eps: float) -> mx.array:
    """`hyper_mix`, then `hyper_leave`: x; on CUDA in one pass over the streams."""
    cuda = hyper_cuda.leave if hyper_cuda.fits(streams, fn) else None
    return pick(_mix_and_leave, cuda=cuda)(streams, fn, update, scale, base, norm, hc_eps, norm_eps)


def _mix_and_enter(streams, fn, update, scale, base, norm, iterations, hc_eps, norm_eps):
    streams, sums = hyper_mix(streams, fn, update)
    x, post, m = hyper_enter(streams, sums, scale, base, norm, iterations, hc_eps, norm_eps)
    return x, streams, post, m


def _mix_and_leave(streams, fn, update, scale, base, norm, hc_eps, norm_eps):
    streams, sums = hyper_mix(streams, fn, update)
    return hyper_leave(streams, sums, scale, base, norm, hc_eps, norm_eps)


def _has_kernels(streams: mx.array) -> bool:
    """Matrices whose elements are lanes, pairs of channels, and a simdgroup more than collapses D in 1024 threads."""
    _, N, D = streams.shape
    return N in (2, 4) and D % 2 == 0 and D <= 992 * COLLAPSED


def _float_product(x: mx.array, w: Blocks) -> mx.array:
    """x W^T wherever it runs: streams are not normalised, so halves, as Metal's prefill has them, would not do."""
    return dense_reference(x, w)


def mix_cpu(streams, fn, update):
    if not native_step.takes_streams(streams):
        return mix_reference(streams, fn, update, dense_matmul)
    after, sums = native_step.mix_streams(streams, update, fn.shape[0])
    sums[:, :-1] = native.matmul(after.reshape(len(after), -1), fn.host(), fn.kind)
    return mx.array(after) if update else streams, mx.array(sums[:, None])


def enter_cpu(streams, sums, scale, base, norm, iterations, hc_eps, norm_eps):
    run = native_step.enter if native_step.takes_streams(streams) else enter_reference
    return run(streams, sums, scale, base, norm, iterations, hc_eps, norm_eps)


def leave_cpu(streams, sums, scale, base, norm, hc_eps, norm_eps):
    if not native_step.takes_streams(streams):
        return leave_reference(streams, sums, scale, base, norm, hc_eps, norm_eps)
    return native_step.enter(streams, sums, scale, base, norm, 0, hc_eps, norm_eps, leave=True)[0]


def mix_reference(streams, fn, update, product: Product = _float_product):
    if update is not None:
        streams = post_reference(update[0], streams, *update[1:])
    flat = streams.reshape(streams.shape[0], -1)
    sums = mx.concatenate([product(flat, fn), (flat * flat).sum(axis=-1, keepdims=True)], axis=-1)
    return streams, sums[:, None]


def enter_reference(streams, sums, scale, base, norm, iterations, hc_eps, norm_eps):
    x, post, m = pre_reference(streams, _mix(streams, sums, norm_eps), scale, base, iterations, hc_eps)
    return mx.fast.rms_norm(x, norm, norm_eps), post, m


def leave_reference(streams, sums, scale, base, norm, hc_eps, norm_eps):
    x = head_reference(streams, _mix(streams, sums, norm_eps), scale, base, hc_eps)
    return mx.fast.rms_norm(x, norm, norm_eps)


def mix_metal(streams, fn, update):
    (T, N, D), M = streams.shape, fn.shape[0]
    parts, tokens = -(-D // CHANNELS), min(T, TOKENS)
    names = ("streams", "fn", "tokens", "T") + (("y", "post", "m") if update else ())
    sums = ((T, parts, M + 1), mx.float32)
    outputs = {"after": (streams.shape, mx.float32), "sums": sums} if update else {"sums": sums}
    *after, sums = kernel("hyper_mix", "mix", names, tuple(outputs), (("UPDATE", int(bool(update))),))(
        [streams, fn.raw, tokens, T, *(update or ())], list(outputs.values()),
        (parts, -(-T // tokens), 1), (128, 1, 1),
        [("W", NUMBERS[fn.kind]), ("N", N), ("D", D), ("M", M)])
    return after[0] if after else streams, sums


def enter_metal(streams, sums, scale, base, norm, iterations, hc_eps, norm_eps):
    T, N, D = streams.shape
    names = ("streams", "sums", "scale", "base", "norm", "parts", "iterations", "hc_eps", "norm_eps")
    x, post, m = kernel("hyper_mix", "enter", names, ("x", "post", "m"))(
        [streams, sums, scale, base, norm, sums.shape[1], iterations, float(hc_eps), float(norm_eps)],
        [((T, D), mx.float32), ((T, N), mx.float32), ((T, N, N), mx.float32)],
        (T, 1, 1), (_collapsing(D) + 32, 1, 1), [("N", N), ("D", D)])
    return x, post, m


def leave_metal(streams, sums, scale, base, norm, hc_eps, norm_eps):
    T, N, D = streams.shape
    names = ("streams", "sums", "scale", "base", "norm", "parts", "hc_eps", "norm_eps")
    (x,) = kernel("hyper_mix", "leave", names, ("x",))(
        [streams, sums, scale, base, norm, sums.shape[1], float(hc_eps), float(norm_eps)], [((T, D), mx.float32)],
        (T, 1, 1), (_collapsing(D), 1, 1), [("N", N), ("D", D)])
    return x


def _collapsing(D: int) -> int:
    """Threads, in whole simdgroups, that collapse D channels."""
    return -(-D // (32 * COLLAPSED)) * 32


def head_reference(streams, mix, scale, base, eps):
    return _collapse(mx.sigmoid(mix * scale + base) + eps, streams)


def pre_reference(streams, mix, scale, base, iterations, eps):
    n = streams.shape[1]
    pre = mx.sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * mx.sigmoid(mix[:, n:2 * n] * scale[1] + base[n:2 * n])
    m = (mix[:, 2 * n:] * scale[2] + base[2 * n:]).reshape(-1, n, n)
    return _collapse(pre, streams), post, sinkhorn(mx.softmax(m, axis=-1) + eps, iterations, eps)


def post_reference(y, streams, post, m):
    return post[..., None] * y[:, None] + (m[..., None] * streams[:, :, None]).sum(axis=1)


def sinkhorn(m: mx.array, iterations: int, eps: float) -> mx.array:
    """Columns, then iterations - 1 times rows and columns, each divided by its sum + eps.  m [T, N, N]."""
    m = m / (m.sum(axis=1, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(axis=2, keepdims=True) + eps)
        m = m / (m.sum(axis=1, keepdims=True) + eps)
    return m


def _collapse(pre: mx.array, streams: mx.array) -> mx.array:
    return (pre[..., None] * streams).sum(axis=1)


def _mix(streams: mx.array, sums: mx.array, eps: float) -> mx.array:
    """Products of the normalised streams from those of the streams as they are: [T, M]."""
    total = sums.sum(axis=1)
    return total[:, :-1] * mx.rsqrt(total[:, -1:] / (streams.shape[1] * streams.shape[2]) + eps)
