"""What attention keeps of a chunk: its latent queries, normalised, and its rows behind those of the window."""
import mlx.core as mx
import numpy as np

from ds4mlx.ops import cuda_kernel, keep_cuda, native_step
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import Input, kernel
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
    width, dtype = _row(kv, cos, packed)
    if window.shape[1] != width or window.dtype != dtype:
        raise ValueError(f"latent: window {window.shape} {window.dtype}, needed rows of {width} {dtype}")
    return pick(reference, metal=metal, cuda=cuda, native=cpu)(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)


def latent_step(q: mx.array, kv: mx.array, q_norm: mx.array, kv_norm: mx.array, cos: mx.array, sin: mx.array,
                windows: mx.array, positions: mx.array, packed: bool, eps: float) -> tuple[mx.array, mx.array]:
    """`latent` of one token of each of B sequences, whose windows are rings.

    q [B, Q], kv [B, D], positions i32 [B], the others as there; windows [B, W, row]: the row of position p lies at
    p % W. Returns qr [B, Q] f32 and the windows with the tokens' rows. Raises ValueError for other windows.
    """
    width, dtype = _row(kv, cos, packed)
    if windows.shape[::2] != (kv.shape[0], width) or windows.dtype != dtype or positions.shape != kv.shape[:1]:
        raise ValueError(f"latent_step: windows {windows.shape} {windows.dtype}, positions {positions.shape}, needed "
                         f"rows of {width} {dtype} for {kv.shape[0]} sequences")
    run = pick(step_reference, metal=step_metal, cuda=step_cuda, native=step_cpu)
    return run(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps)


def _row(kv: mx.array, cos: mx.array, packed: bool) -> tuple[int, mx.Dtype]:
    D, R = kv.shape[1], 2 * cos.shape[1]
    return (pack_bytes(D, R), mx.uint8) if packed else (D, mx.float32)


def cpu(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    form = native_step.row_form(window, kv.shape[1], 2 * cos.shape[1])
    if not form.fits() or q.shape[1] % native_step.LANES:
        return reference(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)
    rows = mx.array(native_step.make_rows(kv, form, kv_norm, eps, cos, sin))
    return _latent_queries(q, q_norm, cos, sin, eps), mx.concatenate([window, rows]) if window.size else rows


def step_cpu(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps):
    (B, width, _), form = windows.shape, native_step.row_form(windows, kv.shape[1], 2 * cos.shape[1])
    if not form.fits() or q.shape[1] % native_step.LANES:
        return step_reference(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps)
    mx.eval(windows)
    after = np.array(windows)       # a copy
    places = np.arange(B) * width + np.array(positions) % width
    native_step.make_rows(kv, form, kv_norm, eps, cos, sin, after, places)
    return _latent_queries(q, q_norm, cos, sin, eps), mx.array(after)


def _latent_queries(q: mx.array, norm: mx.array, cos: mx.array, sin: mx.array, eps: float) -> mx.array:
    return mx.array(native_step.make_rows(q, native_step.Rows(q.shape[1], 0, None), norm, eps, cos[:, :0], sin[:, :0]))


def reference(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    qr, rows = _made(q, kv, q_norm, kv_norm, cos, sin, packed, eps)
    return qr, mx.concatenate([window, rows])


def step_reference(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps):
    qr, rows = _made(q, kv, q_norm, kv_norm, cos, sin, packed, eps)
    places = (positions % windows.shape[1])[:, None, None]
    return qr, mx.put_along_axis(windows, places, rows[:, None], axis=1)


def _made(q: mx.array, kv: mx.array, q_norm: mx.array, kv_norm: mx.array, cos: mx.array, sin: mx.array, packed: bool,
          eps: float) -> tuple[mx.array, mx.array]:
    row = rope_reference(mx.fast.rms_norm(kv, kv_norm, eps), cos, sin)
    return mx.fast.rms_norm(q, q_norm, eps), pack(row, "fp8" if packed else None, 2 * cos.shape[1])


def metal(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    if not _has_kernel(q, kv, cos):
        return reference(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)
    before, tokens = window.shape[0], kv.shape[0]
    held = window if before else mx.zeros(8, window.dtype)     # an empty buffer has no address
    return _launch(q, kv, q_norm, kv_norm, cos, sin, held, {"before": before}, (before + tokens, window.shape[1]),
                   before, 0, eps)


def step_metal(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps):
    if not _has_kernel(q, kv, cos):
        return step_reference(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps)
    return _launch(q, kv, q_norm, kv_norm, cos, sin, windows, {"positions": positions}, windows.shape,
                   windows.shape[0] * windows.shape[1], windows.shape[1], eps)


def cuda(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps):
    (T, D), R = kv.shape, 2 * cos.shape[1]
    if not T or not keep_cuda.latent_fits(D, R):
        return reference(q, kv, q_norm, kv_norm, cos, sin, window, packed, eps)
    call = f"::latent(q, kv, q_norm, kv_norm, cosine, sine, qr, (u8*)rows, {float(eps)!r}f);"
    qr, rows = cuda_kernel.kernel("latent", call, ("q", "kv", "q_norm", "kv_norm", "cosine", "sine"), ("qr", "rows"),
                                  keep_cuda.sizes(q.shape[1], D, R, *_row(kv, cos, packed)), D)(
        [q, kv, q_norm, kv_norm, cos, sin], [(q.shape, mx.float32), ((T, window.shape[1]), window.dtype)], (T, 2))
    return qr, mx.concatenate([window, rows]) if window.size else rows


def step_cuda(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps):
    (_, D), R = kv.shape, 2 * cos.shape[1]
    if not keep_cuda.latent_fits(D, R):
        return step_reference(q, kv, q_norm, kv_norm, cos, sin, windows, positions, packed, eps)
    part = keep_cuda.latent_part(q, kv, q_norm, kv_norm, cos, sin, windows)
    return tuple(keep_cuda.launch(positions, [part], keep_cuda.sizes(q.shape[1], D, R, *_row(kv, cos, packed)), eps))


def _has_kernel(q: mx.array, kv: mx.array, cos: mx.array) -> bool:
    """So has every released model."""
    D, R = kv.shape[1], 2 * cos.shape[1]
    return not (D % 128 or D > 4096 or q.shape[1] % 4 or R % 4 or (D - R) % 64)


def _launch(q: mx.array, kv: mx.array, q_norm: mx.array, kv_norm: mx.array, cos: mx.array, sin: mx.array,
            held: mx.array, where: dict[str, Input], shape: tuple[int, ...], copied: int, ring: int,
            eps: float) -> tuple[mx.array, mx.array]:
    """`copied` rows of `held`; `where` tells where the new ones go; `ring` is the size of each sequence's, or 0."""
    (T, D), Q, R = kv.shape, q.shape[1], 2 * cos.shape[1]
    row_bytes = shape[-1] * held.itemsize
    word = mx.uint16 if row_bytes % 4 else mx.uint32
    words = copied * row_bytes // word.size
    inputs = {"q": q, "kv": kv, "q_norm": q_norm, "kv_norm": kv_norm, "cos": cos, "sin": sin, "window": held, **where,
              "words": words, "tokens": T, "eps": eps}
    sizes = [("WIDTH", ring), ("ROW", row_bytes // word.size)] if ring else []
    qr, rows = kernel("latent", "latent", tuple(inputs), ("qr", "rows"), (("RING", int(ring > 0)),))(
        list(inputs.values()), [((T, Q), mx.float32), (shape, held.dtype)],
        (2 * T + -(-words // (COPIED * (D // 4))), 1, 1), (D // 4, 1, 1),
        [("D", D), ("Q", Q), ("R", R), ("COPIED", COPIED), ("WORD", word), *sizes])
    return qr, rows
