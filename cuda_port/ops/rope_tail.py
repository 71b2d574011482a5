"""What a step starts with: tables of rotary angles, and the rows of the embedding."""
from ctypes import c_longlong

from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import BLOCK_TYPES


def tables(positions: "cp.ndarray", frequencies: "cp.ndarray", out: "cp.ndarray") -> None:
    """Cosines and sines of T positions i32 [T], out f32 [4, 2, T, P]: plain, compressed, and compressed at the first
    positions of the groups of 4 and of 128. frequencies f64 [2, P]: plain, compressed; radians a position."""
    T, P = out.shape[2:]
    launch(kernel("rope_tail", "tables"), (T,), (128,), (positions, frequencies, out, T, P))


def group_tables(first: int, ratio: int, frequencies: "cp.ndarray", out: "cp.ndarray") -> None:
    """The same for the groups of `ratio` tokens from group `first` on, compressed: out f32 [2, G, P]."""
    _, G, P = out.shape
    if G:
        launch(kernel("rope_tail", "group_tables"), (G,), (32,),
               (first, ratio, frequencies, out, G, P))


def embed(table: Weight, ids: "cp.ndarray", streams: "cp.ndarray") -> None:
    """streams[t, n] = table[ids[t]]: ids i32 [T], streams f32 [T, N, D]."""
    T, N, D = streams.shape
    defines = (("KIND", BLOCK_TYPES[table.kind].type_id), ("D", D), ("N", N))
    launch(kernel("rope_tail", "embed", defines), (-(-D // 256), T), (256,),
           (table.raw, c_longlong(table.raw.shape[-1]), ids, streams))
