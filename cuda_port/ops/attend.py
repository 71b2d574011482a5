"""Attention over the window's rows and the compressed rows, with a sink; a row is key and value at once."""
from dataclasses import dataclass

from ctypes import c_longlong

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import Defines, kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import AttendForm
from ds4mlx.cuda_port.launch import clusters, launch, limits
from ds4mlx.cuda_port.ops.hyper_mix import NO_WAY_BACK, WayBack
from ds4mlx.cuda_port.sizes import Sizes

EXACT = ("STEP", 0), ("HEADS", 16), ("KEYS", 64), ("GROUPS", 4)    # what `attend_exact` is compiled beside


@dataclass(frozen=True, slots=True)
class Rows:
    """What T tokens attend to, beside their own chunk.

    window: u8 [slots, slot bytes] from where the layer's rings begin. slots i32: [1] of a chunk's session, [T] of a
    step's. fresh: u8 [T, row bytes], a chunk's own rows; None in a step, whose rings have them. pool: u8, pages of
    compressed rows; pages i32 [P], or [T, P] in a step; None without compression. chosen i32 [T, k], used for tokens
    that see more than k rows. most: compressed rows that any token may see.
    """
    window: "cp.ndarray"
    slot_bytes: int
    slots: "cp.ndarray"
    fresh: "cp.ndarray | None"
    pool: "cp.ndarray | None"
    pages: "cp.ndarray | None"
    chosen: "cp.ndarray | None"
    most: int


def attend(q: "cp.ndarray", table: "cp.ndarray", rows: Rows, positions: "cp.ndarray", sink: "cp.ndarray", ratio: int,
           sizes: Sizes, eps: float, exact: bool, o: "cp.ndarray", back: WayBack | None = None) -> None:
    """o[t, h] = softmax over the keys that t sees, and the sink, of q[t, h] . key / sqrt(D), times the keys.

    q f32 [T, H D] as projected: heads are divided by their rms and rotated; outputs are rotated back. table f32
    [2, T, P]; positions i32 [T]; sink f32 [H]; o f32 [T, H D]. Halves in the products unless `exact`, or rows are
    floats, or a chunk's tile finds no room on the card. back: of attention's hyper-connection, in a step.
    """
    T, H, D = len(q), sizes.heads, sizes.head_dim
    chunk = rows.fresh is not None
    picks = 0 if rows.chosen is None else rows.chosen.shape[1]
    defines = (*sizes.defines(ratio), ("H", H), ("WIDTH", sizes.window), ("CHOSEN", int(rows.chosen is not None)))
    state, last = (rows.window, c_longlong(rows.slot_bytes), rows.slots), back.arguments() if back else NO_WAY_BACK
    defines += back.defines() if back else (("STREAMS", 1), ("HIDDEN", 1))
    form = AttendForm.chunk(H, D, sizes.row_bytes, limits()) if chunk else None
    if exact or not sizes.packed or chunk and form is None:
        page_step = 0 if chunk or rows.pages is None else rows.pages.shape[1]
        launch(kernel("attend", "attend_exact", (*defines, *EXACT)), (H + bool(back), T), (256,),
               (q, table[0], table[1], *state, not chunk, rows.fresh, chunk, rows.pool, rows.pages, page_step,
                positions, rows.chosen, picks, sink, eps, o, *last))
    elif form:
        launch(kernel("attend", "attend", (*defines, *form.defines), form.shared_bytes), (-(-H // form.heads), T),
               (form.threads,), (q, table[0], table[1], *state, rows.fresh, rows.pool, rows.pages, positions,
                                 rows.chosen, picks, sink, eps, o), form.shared_bytes)
    else:
        _attend_step(q, table, rows, positions, picks, sink, defines, sizes, eps, o, last)


def _attend_step(q: "cp.ndarray", table: "cp.ndarray", rows: Rows, positions: "cp.ndarray", picks: int,
                 sink: "cp.ndarray", defines: Defines, sizes: Sizes, eps: float, o: "cp.ndarray",
                 last: "tuple[cp.ndarray | int | float | None, ...]") -> None:
    T, H = len(q), len(sink)
    D, clustered = q.shape[1] // H, clusters()
    keys = sizes.window + min(rows.most, picks or rows.most)    # of a token, at most
    args = [q, table[0], table[1], rows.window, c_longlong(rows.slot_bytes), rows.slots, rows.pool, rows.pages,
            0 if rows.pages is None else rows.pages.shape[1], positions, rows.chosen, picks, sink, eps, o]
    form = AttendForm.step(H, D, T, keys, clustered, limits())
    sums, bounds, defines = None, None, (*defines, *form.defines)
    if not clustered:
        sums = scratch.take("attend.sums", (T, H, form.slices, D))
        bounds = scratch.take("attend.limits", (T, H, form.slices, 2))
    columns = -(-H // form.heads) * T + (last[0] is not None)
    launch(kernel("attend", "attend", defines, form.shared_bytes), (columns, 1, form.slices), (form.threads,),
           (*args, sums, bounds, *last), form.shared_bytes)
    if not clustered:
        launch(kernel("attend", "combine", defines), (H, T), (D // 2,), (sums, bounds, sink, table[0], table[1], o))
