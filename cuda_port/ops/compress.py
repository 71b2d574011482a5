"""A chunk's tokens into a compressor: the rows of the groups that it completes, and the frontier after it."""
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch
from ds4mlx.cuda_port.ops.latent import Compressor
from ds4mlx.cuda_port.sizes import Sizes, overlap, page_rows


def compress(k: "cp.ndarray", s: "cp.ndarray", of: Compressor, ring: "cp.ndarray", table: "cp.ndarray",
             pages: "cp.ndarray", start: int, ratio: int, sizes: Sizes, eps: float) -> None:
    """row = pack(rotate(rms(pooled) norm)) for each completed group, into the pool.

    k, s f32 [T, columns] of the tokens from position `start` on; ring, the session's frontier: the last tokens' k and
    s with `ape` added, at position modulo its length; table f32 [2, G, P] of the groups' first positions; pages i32
    [P].
    """
    T, groups = len(k), table.shape[1]
    width = sizes.index_dim if of.index else sizes.head_dim
    defines = (("RATIO", ratio), ("M", overlap(ratio)), ("W", width), ("R", sizes.rotary), ("INDEX", int(of.index)),
               ("PACKED", int(sizes.packed)), ("PAGE_ROWS", page_rows(ratio)),
               ("ROW", sizes.index_row_bytes if of.index else sizes.row_bytes))
    if groups:
        launch(kernel("compress", "rows", defines), (groups,), (width,),
               (k, s, ring, of.ape, of.norm, table[0], table[1], of.rows, pages, start, eps))
    launch(kernel("compress", "keep", defines), (min(T, overlap(ratio) * ratio),), (256,),
           (k, s, ring, of.ape, start, T))
