"""Matrices of GGUF blocks on the card: into the order that kernels read fastest, and into plain numbers."""
import ctypes
from dataclasses import replace

import numpy as np

from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import TILE_ROWS, can_be_arranged
from ds4mlx.cuda_port.launch import launch, processors
from ds4mlx.cuda_port.scratch import take
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import BLOCK_TYPES

SLAB_BYTES = 1 << 28


def arranged(w: Weight, tiled: bool = False) -> Weight:
    """The same weights with every row's codes before its scales, or in tiles (blocks.cuh), rewritten in place; `w` is
    then void.

    Returns `w` as it is where there is no kernel for its type and shape: those read rows in the order of the file.
    """
    if w.arranged or not (tiled or can_be_arranged(w.kind, w.shape)):
        return w
    row_bytes = w.raw.shape[-1]
    rows = w.raw.reshape(-1, row_bytes)
    function = kernel("dequantize", "tile" if tiled else "arrange", _macros(w, "float"))
    slab = max(1, SLAB_BYTES // row_bytes // TILE_ROWS) * TILE_ROWS
    for start in range(0, len(rows), slab):
        part = rows[start:start + slab]
        old = take("arranged", part.shape, np.uint8)
        old[...] = part
        launch(function, (8 * processors(),), (512,), [old, part, ctypes.c_size_t(part.size)])
    return replace(w, arranged=True, tiled=tiled)


def dequantize(w: Weight, start: int, out: "cp.ndarray") -> None:
    """out = rows [start, start + len(out)) of a matrix, f16 or f32 [n, width]. Halves saturate."""
    assert len(w.shape) == 2 and (not w.arranged or w.kind == "Q8_0")
    real = "__half" if out.dtype == np.float16 else "float"
    octets = len(out) * -(-w.shape[1] // 8)
    launch(kernel("dequantize", "dequantize", _macros(w, real)), (min(-(-octets // 256), 32 * processors()),), (256,),
           [w.raw[start:start + len(out)], out, ctypes.c_size_t(octets)])


def to_half(x: "cp.ndarray", out: "cp.ndarray", rest: "cp.ndarray | None" = None) -> None:
    """out f16 = x f32, saturating; rest f16 = x - out."""
    macros = (("KIND", 0), ("WIDTH", 8), ("OUT", "__half"), ("ARRANGED", 0))
    launch(kernel("dequantize", "to_half", macros), (min(-(-x.size // 256), 32 * processors()),), (256,),
           [x, out, rest, ctypes.c_size_t(x.size)])


def _macros(w: Weight, real: str) -> tuple[tuple[str, int | str], ...]:
    return (("KIND", BLOCK_TYPES[w.kind].type_id), ("WIDTH", w.shape[-1]), ("OUT", real), ("ARRANGED", int(w.arranged)))
