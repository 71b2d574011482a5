"""Attention on CUDA: a chunk's tokens, or a step of many sequences, whose keys are split over blocks."""
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ds4mlx.cuda_port.forms import AttendForm
from ds4mlx.cuda_port.source import Defines
from ds4mlx.ops.card import limits
from ds4mlx.ops.cuda_kernel import kernel, zeros
from ds4mlx.ops.dispatch import exact
from ds4mlx.ops.paged import Paged

LINEAR = 1 << 30        # rows of a ring, or of a page, that are no ring and no page
EXACT = ("STEP", 0), ("HEADS", 16), ("KEYS", 64), ("GROUPS", 4)    # what `attend_exact` is compiled beside
NONE = "(const u8*)0", "(const int*)0", "(const int*)0", "0"    # rows, pages, chosen, picks
NO_WAY_BACK = "0, 0, 0, 0, 0, 0, 0, 0"  # of a hyper-connection, whose own op does it all here


def fits(D: int, R: int) -> bool:
    return D % 64 == 0 and R % 4 == 0 and D > R


def chunk(q, cos, sin, window, start, rows, chosen, ratio, sink, width, eps):
    """As `attend.attention`, of whose choices it takes one thing for granted: where a token sees no more rows than it
    may choose, it has chosen them all."""
    T, H, packed = q.shape[0], sink.shape[0], window.dtype == mx.uint8
    D, ratio = q.shape[1] // H, ratio if rows is not None else 0
    ratio = ratio if ratio and (start + T) // ratio else 0
    inputs = {"q": q, "cosine": cos, "sine": sin, "window": window, "positions": _positions(start, T), "sink": sink,
              "none": zeros(1)}
    keys = ["(const u8*)0", "none", *NONE[2:]]
    if ratio:
        inputs["rows"], keys[0] = rows, "(const u8*)rows"
        if chosen is not None:
            inputs["chosen"], keys[2:] = chosen, ("chosen", "chosen_shape[1]")
    # The window's rows before the chunk's own, as a ring so long that position p is at p.
    call = ("const u8* first = (const u8*)window; int before = window_shape[0] - q_shape[0];\n"
            "const u8* ring = first - (long long)(positions[0] - before) * ROW;\n"
            "const u8* fresh = first + (size_t)before * ROW;\n")
    macros = _macros(H, D, 2 * cos.shape[1], window, width, LINEAR, LINEAR, ratio, chosen)
    form = None if exact() or not packed else AttendForm.chunk(H, D, window.shape[1], limits())
    if form is None:
        call += (f"::attend_exact(q, cosine, sine, ring, 0, none, 0, fresh, 1, {keys[0]}, {keys[1]}, 0, positions, "
                 f"{keys[2]}, {keys[3]}, sink, {float(eps)!r}f, o, {NO_WAY_BACK});")
        how, grid = (macros + EXACT, 256, 1, 0), (H, T)
    else:
        call += (f"::attend(q, cosine, sine, ring, 0, none, fresh, {keys[0]}, {keys[1]}, positions, {keys[2]}, "
                 f"{keys[3]}, sink, {float(eps)!r}f, o);")
        how, grid = (macros + form.defines, form.threads, 1, form.shared_bytes), (-(-H // form.heads), T)
    (o,) = kernel("attend", call, tuple(inputs), ("o",), *how)(
        list(inputs.values()), [((T, H * D), mx.float32)], grid)
    return o


def step(q, cos, sin, windows, positions, rows: Paged | None, most, chosen, ratio, sink, eps):
    """As `attend.attention_step`, with choices as `chunk` takes them."""
    (B, W, _), H = windows.shape, sink.shape[0]
    D, ratio = q.shape[1] // H, ratio if rows is not None else 0
    inputs = {"q": q, "cosine": cos, "sine": sin, "window": windows, "positions": positions, "sink": sink,
              "slots": _positions(0, B)}
    keys, page_rows, page_step = list(NONE), 1, "0"
    if ratio:
        inputs |= {"rows": rows.rows, "pages": rows.pages}
        keys[:2], page_rows, page_step = ("(const u8*)rows", "pages"), rows.page_rows, "pages_shape[1]"
        if chosen is not None:
            inputs["chosen"], keys[2:] = chosen, ("chosen", "chosen_shape[1]")
    macros = _macros(H, D, 2 * cos.shape[1], windows, W, W, page_rows, ratio, chosen)
    where = "(const u8*)window, (long long)window_shape[1] * ROW, slots"
    if exact() or windows.dtype != mx.uint8:
        call = (f"::attend_exact(q, cosine, sine, {where}, 1, (const u8*)0, 0, {keys[0]}, {keys[1]}, {page_step}, "
                f"positions, {keys[2]}, {keys[3]}, sink, {float(eps)!r}f, o, {NO_WAY_BACK});")
        (o,) = kernel("attend", call, tuple(inputs), ("o",), macros + EXACT, 256)(
            list(inputs.values()), [((B, H * D), mx.float32)], (H, B))
        return o
    of_token = W + min(most, chosen.shape[1] if chosen is not None else most)
    form = AttendForm.step(H, D, B, of_token, False, limits())
    macros += form.defines
    call = (f"::attend(q, cosine, sine, {where}, {keys[0]}, {keys[1]}, {page_step}, positions, {keys[2]}, {keys[3]}, "
            f"sink, {float(eps)!r}f, 0, sums, limits, {NO_WAY_BACK});")
    sums, limits_ = kernel("attend", call, tuple(inputs), ("sums", "limits"), macros, form.threads, form.blocks,
                          form.shared_bytes)(
        list(inputs.values()), [((B, H, form.slices, D), mx.float32), ((B, H, form.slices, 2), mx.float32)],
        (-(-H // form.heads), B, form.slices))
    (o,) = kernel("attend", "::combine(sums, limits, sink, cosine, sine, o);",
                  ("sums", "limits", "sink", "cosine", "sine"), ("o",), macros, D // 2)(
        [sums, limits_, sink, cos, sin], [((B, H * D), mx.float32)], (H, B))
    return o


def _macros(H: int, D: int, R: int, window: mx.array, width: int, ring: int, page_rows: int, ratio: int,
            chosen: mx.array | None) -> Defines:
    return (("D", D), ("R", R), ("ROW", window.shape[-1] * window.itemsize), ("PACKED", int(window.dtype == mx.uint8)),
            ("RATIO", ratio), ("PAGE_ROWS", page_rows), ("RING", ring), ("H", H), ("WIDTH", width),
            ("CHOSEN", int(bool(ratio) and chosen is not None)), ("STREAMS", 1), ("HIDDEN", 1))


@lru_cache(maxsize=8)       # of a chunk's layers, which all ask for the same
def _positions(start: int, count: int) -> mx.array:
    return mx.array(np.arange(start, start + count, dtype=np.int32))
