"""Attention over the window's rows and the compressed rows, with a sink; a row is key and value at once."""
from collections.abc import Callable
from math import isqrt

import mlx.core as mx
import numpy as np

from ds4mlx.ops import attend_cuda, native, native_step
from ds4mlx.ops.dispatch import exact, pick
from ds4mlx.ops.kernel import Input, kernel
from ds4mlx.ops.kv_round import fp8_unpack, pack_bytes
from ds4mlx.ops.paged import Paged
from ds4mlx.ops.rope_tail import rope_tail

QUERY_BLOCK = 128       # of the reference: the window of so many spans 255 rows, and 64 heads of scores stay near 25 MB
DECODE_TOKENS = 8       # up to here products are in float32 always
MOST_GROUPS = 128       # threadgroups up to which keys are split
PART, WIDEST = 64, 768  # channels of a SIMD-group; of a head, or threadgroup memory would not do

Product = Callable[[mx.array, mx.array], mx.array]


def attention(q: mx.array, cos: mx.array, sin: mx.array, window: mx.array, start: int, rows: mx.array | None,
              chosen: mx.array | None, ratio: int, sink: mx.array, width: int, eps: float) -> mx.array:
    """o[t, h] = sum_k exp(z_k - m) key_k / (exp(sink[h] - m) + sum_k exp(z_k - m)), z_k = q[t, h] . key_k / sqrt(D).

    q [T, H*D] f32 as projected: each head is divided by its rms, and its last R channels are rotated by cos, sin
    [T, R/2] f32; those of o are rotated back. The keys of query j, at position t = start + j, are the rows of
    positions t - width < p <= t in window [R0, row], whose last row is position start + T - 1, and the compressed
    rows c < (t + 1) // ratio: all such of rows [C, row], or those that chosen [T, K] i32 names, ascending, where
    entries that are not visible are ignored. ratio is 0 without compression.
    Rows are f32 [.., D], or packed to bytes by `kv_round.fp8_pack`. sink [H] is a raw logit, not scaled.
    Softmax in float32. Returns [T, H*D] f32. Raises ValueError when the shapes do not fit.
    """
    T, H = q.shape[0], sink.shape[0]
    D, R = q.shape[1] // H, 2 * cos.shape[1]
    least = T + min(start, width - 1)
    if q.shape[1] % H or cos.shape[0] != T or not least <= window.shape[0] <= start + T:
        raise ValueError(f"attention: q {q.shape} with {H} sinks and tables {cos.shape} from position {start} on needs "
                         f"{least} to {start + T} rows in its window, got {window.shape}")
    for keys in (window, rows):
        _check_row(keys, D, R, "attention")
    if chosen is not None and (rows is None or chosen.shape[0] != T):
        raise ValueError(f"attention: choice {chosen.shape} for {T} tokens, of {0 if rows is None else len(rows)} rows")
    cuda = attend_cuda.chunk if attend_cuda.fits(D, R) else None
    run = pick(reference, metal=metal, cuda=cuda, native=cpu)
    return run(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps)


def attention_step(q: mx.array, cos: mx.array, sin: mx.array, windows: mx.array, positions: mx.array,
                   rows: Paged | None, most: int, chosen: mx.array | None, ratio: int, sink: mx.array,
                   eps: float) -> mx.array:
    """`attention` of one token of each of B sequences.

    q [B, H*D], cos, sin [B, R/2], sink [H] as there; positions i32 [B]. windows [B, W, row] are rings: the row of
    position p lies at p % W, the token's own included. Compressed rows are those c < (positions[b] + 1) // ratio of
    rows, or of them those that chosen [B, K] i32 names; most is the largest number of them that any sequence sees.
    Returns [B, H*D] f32. Raises ValueError when the shapes do not fit.
    """
    B, H = q.shape[0], sink.shape[0]
    D, R = q.shape[1] // H, 2 * cos.shape[1]
    if q.shape[1] % H or cos.shape[0] != B or windows.shape[0] != B or positions.shape != (B,):
        raise ValueError(f"attention_step: q {q.shape} with {H} sinks, tables {cos.shape}, windows {windows.shape}, "
                         f"positions {positions.shape}: needed one row of each for {B} sequences")
    for keys in (windows, rows.rows if rows else None):
        _check_row(keys, D, R, "attention_step")
    if rows is not None and (rows.pages.shape[0] != B or not 0 <= most <= rows.most):
        raise ValueError(f"attention_step: {most} rows of {B} sequences, page tables {rows.pages.shape} of "
                         f"{rows.page_rows} rows a page")
    if chosen is not None and (rows is None or chosen.shape[0] != B):
        raise ValueError(f"attention_step: choice {chosen.shape} for {B} sequences, {'with' if rows else 'no'} rows")
    if rows is None or not ratio or not most:
        rows, most, chosen = None, 0, None
    cuda = attend_cuda.step if attend_cuda.fits(D, R) else None
    run = pick(step_reference, metal=step_metal, cuda=cuda, native=step_cpu)
    return run(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps)


def _check_row(keys: mx.array | None, D: int, R: int, op: str) -> None:
    if keys is not None and keys.shape[-1] != {mx.uint8: pack_bytes(D, R), mx.float32: D}.get(keys.dtype):
        raise ValueError(f"{op}: rows {keys.shape} {keys.dtype} for heads of {D} channels, {R} of them rotary")


def cpu(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps):
    return reference(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps, native.product)


def reference(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps, product: Product = mx.matmul):
    T, H = q.shape[0], sink.shape[0]
    D, tail = q.shape[1] // H, 2 * cos.shape[1]
    q = rope_tail(mx.fast.rms_norm(q.reshape(T, H, D), None, eps), cos, sin)
    window, base = _unpacked(window, D, tail), start + T - window.shape[0]      # position of the window's first row
    visible = (np.arange(start, start + T) + 1) // ratio if rows is not None and ratio else np.zeros(T, np.int64)
    if visible[-1] and (chosen is None or visible[-1] <= min(T, QUERY_BLOCK) * chosen.shape[1]):
        rows = _unpacked(rows[:int(visible[-1])], D, tail)   # once, unless a block of queries chooses fewer
    parts = []
    for b in range(0, T, QUERY_BLOCK):
        block = slice(b, min(b + QUERY_BLOCK, T))
        t = np.arange(start, start + T)[block]
        first = max(int(t[0]) - width + 1, 0)                                   # rows that any of these queries sees
        p = np.arange(first, int(t[-1]) + 1)
        window_mask = mx.array((p <= t[:, None]) & (p > t[:, None] - width))
        seen, rows_mask = _visible_rows(rows, None if chosen is None else chosen[block], visible[block], D, tail)
        near = window[first - base:int(t[-1]) + 1 - base]
        parts.append(_attend(q[block], near, window_mask, seen, rows_mask, sink, product))
        if T > QUERY_BLOCK:
            mx.eval(parts[-1])  # or the keys and scores of several blocks would be alive at once
    o = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return rope_tail(o, cos, sin, inverse=True).reshape(T, H * D)


def step_cpu(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps):
    if native_step.row_form(windows, q.shape[1] // sink.shape[0], 2 * cos.shape[1]).fits():
        return native_step.attend(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps)
    return step_reference(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps, native.product)


def step_reference(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps, product: Product = mx.matmul):
    B, H = q.shape[0], sink.shape[0]
    D, tail = q.shape[1] // H, 2 * cos.shape[1]
    q = rope_tail(mx.fast.rms_norm(q.reshape(B, H, D), None, eps), cos, sin) * D ** -0.5
    keys, seen = _unpacked(windows, D, tail), mx.arange(windows.shape[1]) <= positions[:, None]
    if rows is not None:
        which = mx.arange(most)[None] if chosen is None else chosen
        seen_rows = mx.broadcast_to(which < ((positions + 1) // ratio)[:, None], (B, which.shape[1]))
        keys = mx.concatenate([keys, _unpacked(rows.at(mx.minimum(which, most - 1)), D, tail)], axis=1)
        seen = mx.concatenate([seen, seen_rows], axis=1)
    keys = mx.where(seen[..., None], keys, 0)                                   # NaN counts even without weight
    z = mx.where(seen[:, None], product(q, keys.swapaxes(1, 2)), -mx.inf)       # [B, H, keys]
    z = mx.concatenate([z, mx.broadcast_to(sink.reshape(1, H, 1), (B, H, 1))], axis=-1)
    o = product(mx.softmax(z, axis=-1, precise=True)[..., :-1], keys)
    return rope_tail(o, cos, sin, inverse=True).reshape(B, H * D)


def metal(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps):
    T, H = q.shape[0], sink.shape[0]
    if not _has_kernel(q.shape[1] // H, 2 * cos.shape[1]):
        return reference(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps)
    if rows is None or not ratio:
        rows, count, ratio, chosen = window, 0, 1, None   # a buffer is needed, and none of it is read
    else:
        count = min((start + T) // ratio, rows.shape[0])
    where = {"window": window, "rows": rows, "start": start, "window_rows": window.shape[0]}
    return _launch(q, cos, sin, where, count, ratio, chosen, sink, width, min(width, start + T), eps)


def step_metal(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps):
    (B, width, row), H = windows.shape, sink.shape[0]
    if not _has_kernel(q.shape[1] // H, 2 * cos.shape[1]):
        return step_reference(q, cos, sin, windows, positions, rows, most, chosen, ratio, sink, eps)
    window = windows.reshape(B * width, row)
    paged = rows or Paged(window, positions[:, None], 1)  # buffers are needed, and nothing of them is read
    where = {"window": window, "rows": paged.rows, "pages": paged.pages, "held": paged.pages.shape[1],
             "positions": positions, "window_rows": B * width}
    return _launch(q, cos, sin, where, most, ratio or 1, chosen, sink, width, width, eps, paged.page_rows)


def _has_kernel(D: int, R: int) -> bool:
    """Channels are dealt out by whole blocks of codes: so has every published model."""
    return D % PART == 0 and R % PART == 0 and D <= WIDEST


def _launch(q: mx.array, cos: mx.array, sin: mx.array, where: dict[str, Input], count: int, ratio: int,
            chosen: mx.array | None, sink: mx.array, width: int, near: int, eps: float,
            page_rows: int = 0) -> mx.array:
    """`where` has the inputs that tell where rows lie; a step's with pages. near, count: most keys of each kind."""
    T, H = q.shape[0], sink.shape[0]
    D, R = q.shape[1] // H, 2 * cos.shape[1]
    inputs = {"q": q, "cos_table": cos, "sin_table": sin, **where, "sink": sink, "count": count, "ratio": ratio,
              "eps": eps}
    if chosen is not None:
        count = min(count, chosen.shape[1])
        inputs |= {"chosen": chosen, "picks": chosen.shape[1]}
    halves = T > DECODE_TOKENS and not page_rows and not exact()
    groups = -(-H // (16 if halves else 8))
    slices = _slices(near + count, T * groups)
    sizes = [("H", H), ("D", D), ("R", R)]
    tiles = [("TILE", mx.float16), ("HEAD_TILES", 2)] if halves else [("TILE", mx.float32), ("HEAD_TILES", 1)]
    macros = ("CHOSEN", int(chosen is not None)), ("STEP", int(page_rows > 0))
    sums, limits = kernel("attend", "attend", tuple(inputs), ("o", "limits"), macros)(
        list(inputs.values()), [((T, H, slices, D), mx.float32), ((T, H, slices, 2), mx.float32)],
        (groups, T, slices), (D // PART * 32, 1, 1),
        [*sizes, ("WIDTH", width), *([("PAGE_ROWS", page_rows)] if page_rows else []), *tiles])
    if slices == 1:
        return sums.reshape(T, H * D)
    (o,) = kernel("attend", "combine", ("sums", "limits", "cos_table", "sin_table", "slices"), ("o",))(
        [sums, limits, cos, sin, slices], [((T, H * D), mx.float32)], (H, T, 1), (D // 4, 1, 1), sizes)
    return o


def _slices(keys: int, groups: int) -> int:
    """Into how many the keys of a token are split, where its heads alone make `groups` threadgroups of all tokens.

    A slice more means q read, and sums written and read, once more: 393 KB for 64 heads of 512, as much as 670 packed
    rows. A slice less means longer to wait. Twice the root of the blocks of 32 keys grows as the best of the two does:
    4 for a full window, 7 with 512 chosen rows. Never more threadgroups than a large GPU runs at once.
    """
    blocks = -(-keys // 32)
    share = -(-blocks // max(1, min(isqrt(4 * blocks), MOST_GROUPS // groups)))
    return -(-blocks // share)


def _visible_rows(rows: mx.array | None, chosen: mx.array | None, visible: np.ndarray, D: int,
                  tail: int) -> tuple[mx.array | None, mx.array | None]:
    """The compressed rows of a block of queries, [C, D] or each query's own [T, K, D], and who sees which."""
    count = int(visible[-1])
    if not count:
        return None, None
    if chosen is None:
        return rows[:count], mx.array(np.arange(min(count, rows.shape[0])) < visible[:, None])
    hidden = chosen >= mx.array(visible, mx.int32)[:, None]
    return _unpacked(rows[mx.where(hidden, 0, chosen)], D, tail), ~hidden


def _unpacked(rows: mx.array, D: int, tail: int) -> mx.array:
    return fp8_unpack(rows, D, tail) if rows.dtype == mx.uint8 else rows


def _attend(q: mx.array, window: mx.array, window_mask: mx.array, rows: mx.array | None, rows_mask: mx.array | None,
            sink: mx.array, product: Product) -> mx.array:
    """The softmax and the sums, of queries that are ready.

    q [T, H, D]; window [R, D] with window_mask [T, R], True where visible; rows either [C, D] for all queries or
    [T, C, D], each query's own, with rows_mask [T, C]; None without compressed rows. Returns [T, H, D] f32.
    """
    T, H, D = q.shape
    q = q * D ** -0.5
    z = mx.where(window_mask[:, None], product(q, window.T), -mx.inf)           # [T, H, R]
    if rows is not None:
        z_rows = product(q, rows.swapaxes(-1, -2))                              # [T, H, C] for both forms of rows
        z = mx.concatenate([z, mx.where(rows_mask[:, None], z_rows, -mx.inf)], axis=-1)
    z = mx.concatenate([z, mx.broadcast_to(sink.reshape(1, H, 1), (T, H, 1))], axis=-1)
    p = mx.softmax(z, axis=-1, precise=True)
    o = product(p[..., :window.shape[0]], window)
    if rows is not None:
        o = o + product(p[..., window.shape[0]:-1], rows)
    return o
