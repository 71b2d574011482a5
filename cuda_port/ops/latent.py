"""Between the first products of attention and the next: latent queries, new rows, and the compressors' tokens."""
from dataclasses import dataclass

from ctypes import c_longlong

from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch
from ds4mlx.cuda_port.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights of the norms of latent queries [Q] and of rows [D], f32."""
    q: "cp.ndarray"
    kv: "cp.ndarray"


@dataclass(frozen=True, slots=True)
class Compressor:
    """One compressor of a layer. ape f32 [ratio, columns], norm f32 [width]; `state` u8 [slots, slot bytes] from where
    its frontier rings begin; `rows` u8, its pool of pages; `index`: rows are the indexer's."""
    ape: "cp.ndarray"
    norm: "cp.ndarray"
    state: "cp.ndarray"
    rows: "cp.ndarray"
    index: bool


def latent(q: "cp.ndarray", kv: "cp.ndarray", norms: Norms, table: "cp.ndarray", qr: "cp.ndarray", rows: "cp.ndarray",
           sizes: Sizes, eps: float) -> None:
    """A chunk: qr = rms(q) q_norm; rows = pack(rotate(rms(kv) kv_norm)).

    q, qr f32 [T, Q]; kv f32 [T, D]; table f32 [2, T, P], cosine and sine; rows u8 [T, row bytes].
    """
    launch(kernel("latent", "latent", _defines(sizes, 0)), (len(q), 2), (_threads(sizes),),
        (q, kv, norms.q, norms.kv, table[0], table[1], qr, rows, eps))


def keep_rows(rows: "cp.ndarray", ring: "cp.ndarray", start: int, sizes: Sizes) -> None:
    """The last rows of a chunk from position `start` on into a window's ring u8 [ring, row bytes]."""
    launch(kernel("latent", "keep", _defines(sizes, 0)), (min(len(rows), sizes.ring),), (128,),
           (rows, ring, start, len(rows)))


def latent_step(q: "cp.ndarray", kv: "cp.ndarray", norms: Norms, tables: "cp.ndarray", qr: "cp.ndarray",
                window: "cp.ndarray", slot_bytes: int, slots: "cp.ndarray", positions: "cp.ndarray",
                pages: "cp.ndarray", products: "list[tuple[cp.ndarray, cp.ndarray]]", compressors: list[Compressor],
                ratio: int, sizes: Sizes, eps: float) -> None:
    """A token of each of B sessions: `latent` with rows into the windows' rings, and k, s [B, columns] of `products`
    into the compressors' rings, with the rows that they complete into the pools.

    tables as `tables` gives them; slots, positions i32 [B]; pages i32 [B, P]; window u8 [slots, slot bytes] from where
    the layer's rings begin. One launch.
    """
    kind = 1 if ratio else 0
    args = [q, kv, norms.q, norms.kv, tables[kind, 0], tables[kind, 1], qr, window, c_longlong(slot_bytes), slots,
            positions, eps]
    if ratio:
        group = tables[2 if ratio == 4 else 3]
        args += [group[0], group[1], pages, pages.shape[1]]
    for (k, s), c in zip(products, compressors, strict=True):
        args += [k, s, c.ape, c.norm, c.state, c.rows]
    launch(kernel("latent", "step", _defines(sizes, ratio)), (len(q), 2 + len(compressors)), (_threads(sizes),), args)


def _threads(sizes: Sizes) -> int:
    return max(sizes.head_dim, sizes.index_dim)


def _defines(sizes: Sizes, ratio: int) -> tuple[tuple[str, int], ...]:
    return (*sizes.defines(ratio), ("Q", sizes.q_rank), ("INDEX_WIDTH", sizes.index_dim),
            ("INDEX_ROW", sizes.index_row_bytes))


