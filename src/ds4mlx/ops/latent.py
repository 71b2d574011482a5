"""What attention keeps of a chunk: its latent queries, normalised, and its rows behind those of the window."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.kv_round import pack, pack_bytes
from ds4mlx.ops.rope_tail import reference as rope_reference

COPIED = 8  # words of the window that one thread copies


def latent(q: mx.array, kv: mx.array, q_norm: mx.array, kv_norm: mx.array, cos: mx.array, sin: mx.array,
           window: mx.array, packed: bool, eps: float) -> tuple[mx.array, mx.array]:
    """qr = rms(q) * q_norm; row = rms(kv) * kv_norm, its last R channels rotated, then FP8-rounded if `packed`.

    q [T, Q], kv [T, D], q_norm [Q], kv_norm [D], cos, sin [T, R/2], one row a token, all f32; window [R0, row], rows of
    the tokens before: u8 as `kv_round.fp8_pack` writes them if `packed`, else f32 and D wide.
    Returns qr [T, Q] f32 and [R0 + T, row], the window's rows and the new ones. Raises ValueError for another window.
    """
    D, R = kv.shape[1], 2 * cos.shape[1]
    width, dtype = (pack_bytes(D, R), mx.uint8) if packed else (D, mx.float32)
    if window.shape[1] != width or window.dtype != dtype:
        raise ValueError(f"latent: window {window.shape} {window.dtype}, needed rows of {width} {dtype}")
    return pick(reference, metal=metal)(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)


def reference(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    row = rope_reference(mx.fast.rms_norm(kv, kv_norm, eps), cos, sin)
    rows = pack(row, "fp8" if packed else None, 2 * cos.shape[1])
    return mx.fast.rms_norm(q, q_norm, eps), mx.concatenate([window, rows])


def metal(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    (T, D), Q, R = kv.shape, q.shape[1], 2 * cos.shape[1]
    if D % 128 or D > 4096 or Q % 4 or R % 4 or (D - R) % 64:
        return reference(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)    # no released model
    before, row_bytes = window.shape[0], window.shape[1] * window.itemsize
    word = mx.uint16 if row_bytes % 4 else mx.uint32
    words = before * row_bytes // word.size
    held = window if before else mx.zeros(8, window.dtype)     # an empty buffer has no address
    launch = kernel("latent", "latent", ("q", "kv", "q_norm", "kv_norm", "cos", "sin", "window", "before", "words",
                                         "tokens", "eps"), ("qr", "rows"))
    qr, rows = launch([q, kv, q_norm, kv_norm, cos, sin, held, before, words, T, eps],
                      [((T, Q), mx.float32), ((before + T, window.shape[1]), window.dtype)],
                      (2 * T + -(-words // (COPIED * (D // 4))), 1, 1), (D // 4, 1, 1),
                      [("D", D), ("Q", Q), ("R", R), ("COPIED", COPIED), ("WORD", word)])
    return qr, rows
