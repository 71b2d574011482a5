"""Attention over the window's rows and the compressed rows, with a sink; a row is key and value at once."""
from dataclasses import dataclass

from ctypes import c_longlong

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch
from ds4mlx.cuda_port.sizes import Sizes

KEYS = 64            # of a tile
STEP_BLOCKS = 264    # that a step is split into, about: two on each multiprocessor of a large card


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
           sizes: Sizes, eps: float, exact: bool, o: "cp.ndarray") -> None:
    """o[t, h] = softmax over the keys that t sees, and the sink, of q[t, h] . key / sqrt(D), times the keys.

    q f32 [T, H D] as projected: heads are divided by their rms and rotated; outputs are rotated back. table f32
    [2, T, P]; positions i32 [T]; sink f32 [H]; o f32 [T, H D]. Halves in the products unless `exact`.
    """
    T, H, D = len(q), sizes.heads, sizes.head_dim
    chunk = rows.fresh is not None
    picks = 0 if rows.chosen is None else rows.chosen.shape[1]
    page_step = 0 if chunk or rows.pages is None else rows.pages.shape[1]
    defines = (*sizes.defines(ratio), ("H", H), ("WIDTH", sizes.window), ("CHOSEN", int(rows.chosen is not None)))
    args = (q, table[0], table[1], rows.window, c_longlong(rows.slot_bytes), rows.slots, not chunk,
            rows.fresh, chunk, rows.pool, rows.pages, page_step, positions, rows.chosen, picks, sink, eps)
    heads, groups = (64, 16) if chunk and H % 64 == 0 and T > 16 else (16, 4)
    defines = (*defines, ("HEADS", heads), ("KEYS", KEYS), ("GROUPS", groups))
    if exact:
        launch(kernel("attend", "attend_exact", defines), (H, T), (256,), (*args, o))
        return
    keys = sizes.window + (min(rows.most, picks) if picks else rows.most)
    blocks = -(-H // heads)
    slices = 1 if chunk else max(1, min(-(-keys // KEYS), STEP_BLOCKS // (blocks * T)))
    memory = _shared_bytes(heads, D)
    run = kernel("attend", "attend", defines, memory)
    grid, block = (blocks, T, slices), (32 * groups,)
    if slices == 1:
        launch(run, grid, block, (*args, o, None), memory)
        return
    sums, limits = scratch.take("attend.sums", (T, H, slices, D)), scratch.take("attend.limits", (T, H, slices, 2))
    launch(run, grid, block, (*args, sums, limits), memory)
    launch(kernel("attend", "combine", defines), (H, T), (D // 2,), (sums, limits, sink, table[0], table[1], o, slices))


def _shared_bytes(heads: int, D: int) -> int:
    """As TILE_BYTES in the kernel's file."""
    return 2 * (KEYS + heads) * (D + 8) + 4 * heads * (KEYS + 4) + 2 * heads * (KEYS + 8) + 12 * heads + 8 * KEYS
