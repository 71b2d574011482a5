"""Attention over the window's rows and the compressed rows, with a sink; a row is key and value at once."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick


def attend(q: mx.array, window: mx.array, window_mask: mx.array, rows: mx.array | None, rows_mask: mx.array | None,
           sink: mx.array) -> mx.array:
    """o[t, h] = sum_k exp(z_k - m) key_k / (exp(sink[h] - m) + sum_k exp(z_k - m)), z_k = q[t, h] . key_k / sqrt(D).

    q [T, H, D]; window [R, D] with window_mask [T, R], True where visible; rows either [C, D] for all queries or
    [T, C, D], each query's own, with rows_mask [T, C]; None without compressed rows. sink [H] is a raw logit, not
    scaled. Softmax in float32. Returns [T, H, D] f32.
    """
    return pick(reference)(q, window, window_mask, rows, rows_mask, sink)


def reference(q, window, window_mask, rows, rows_mask, sink):
    T, H, D = q.shape
    q = q.astype(mx.float32) * D ** -0.5
    window = window.astype(mx.float32)
    z = mx.where(window_mask[:, None], q @ window.T, -mx.inf)                   # [T, H, R]
    if rows is not None:
        rows = rows.astype(mx.float32)
        z_rows = q @ rows.swapaxes(-1, -2)                                      # [T, H, C] for both forms of rows
        z = mx.concatenate([z, mx.where(rows_mask[:, None], z_rows, -mx.inf)], axis=-1)
    z = mx.concatenate([z, mx.broadcast_to(sink.reshape(1, H, 1), (T, H, 1))], axis=-1)
    p = mx.softmax(z, axis=-1, precise=True)
    o = p[..., :window.shape[0]] @ window
    if rows is not None:
        o = o + p[..., window.shape[0]:-1] @ rows
    return o
