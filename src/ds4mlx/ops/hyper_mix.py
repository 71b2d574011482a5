"""Hyper-connections: the four residual streams mixed into one layer input, and the layer's output mixed back."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick


def hyper_pre(streams: mx.array, mix: mx.array, scale: mx.array, base: mx.array, iterations: int,
              eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """The layer's input, and how its output will be mixed back.

    streams [T, N, D] f32; mix [T, 2N + N*N] f32, the product of the normalised streams with `fn`; scale [3]; base
    [2N + N*N]. Slots: N pre, N post, then an N x N matrix, row = source stream.
    Returns x [T, D] = sum_n pre[n] streams[n]; post [T, N]; M [T, N, N], made doubly stochastic by `iterations`
    Sinkhorn rounds, the first of them over columns only (39 normalisations for 20).
    """
    return pick(pre_reference)(streams, mix, scale, base, iterations, eps)


def hyper_post(y: mx.array, streams: mx.array, post: mx.array, m: mx.array) -> mx.array:
    """out[t, j] = post[t, j] y[t] + sum_i M[t, i, j] streams[t, i].  y [T, D]; the rest as in hyper_pre. f32."""
    return pick(post_reference)(y, streams, post, m)


def hyper_head(streams: mx.array, mix: mx.array, scale: mx.array, base: mx.array, eps: float) -> mx.array:
    """The collapse before the output matrix: x [T, D] = sum_n (sigmoid(mix[n] scale + base[n]) + eps) streams[n]."""
    return pick(head_reference)(streams, mix, scale, base, eps)


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
