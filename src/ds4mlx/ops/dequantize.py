"""GGUF blocks to float32: w = dequantize(blocks). And blocks into the order that CUDA kernels read."""
from functools import cache

import mlx.core as mx
import numpy as np

from ds4mlx.cuda_port.forms import can_be_arranged
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.gguf.dequant import E2M1, IQ2_GRID, IQ2_SIGNS
from ds4mlx.ops import card, cuda_kernel
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.weights import Blocks

THREADS = 64


def dequantize(blocks: mx.array, kind: str) -> mx.array:
    """The weights of rows of blocks, exactly as `gguf.dequant` gives them.

    blocks [..., row bytes] u8, each row whole blocks of the GGUF type `kind`. Returns [..., weights per row] f32.
    Raises ValueError for a type without a decoder.
    """
    if kind not in _DECODERS:
        raise ValueError(f"dequantize: no decoder for {kind}, have {', '.join(_DECODERS)}")
    assert blocks.shape[-1] % BLOCK_TYPES[kind].bytes == 0, (kind, blocks.shape)
    return pick(reference, metal=metal, cuda=cuda)(blocks, kind)


def decoded(w: Blocks, rows: slice = slice(None)) -> mx.array:
    """`dequantize` of some rows of a matrix, in whatever order it keeps them."""
    raw = w.rows(rows)
    return cuda(raw, w.kind, arranged=True) if w.arranged else dequantize(raw, w.kind)


def arrange(w: Blocks) -> Blocks:
    """The same weights, each row with its codes before its scales, where the device has kernels that read such rows.

    w of a matrix [N, row bytes] or a stack of them [E, N, row bytes]; as it is where there is nothing to gain.
    """
    return pick(_as_it_is, cuda=arrange_cuda)(w)


def _as_it_is(w: Blocks) -> Blocks:
    return w


def arrange_cuda(w: Blocks) -> Blocks:
    layout, (*some, size) = BLOCK_TYPES[w.kind], w.shape
    width = size // layout.bytes * layout.weights
    if w.arranged or not can_be_arranged(w.kind, (*some, width)):
        return w
    rows = w.rows().reshape(-1, size)
    call = "::arrange(raw, arranged, (size_t)raw_shape[0] * raw_shape[1]);"
    (raw,) = cuda_kernel.kernel("dequantize", call, ("raw",), ("arranged",), _macros(w.kind, width, False), 512)(
        [rows], [(rows.shape, mx.uint8)], (8 * card.limits().processors,))
    return Blocks(raw.reshape(w.shape), w.kind, arranged=True)


def reference(blocks: mx.array, kind: str) -> mx.array:
    return _DECODERS[kind](blocks)


def cuda(blocks: mx.array, kind: str, arranged: bool = False) -> mx.array:
    layout = BLOCK_TYPES[kind]
    K, rows = blocks.shape[-1] // layout.bytes * layout.weights, blocks.reshape(-1, blocks.shape[-1])
    if not rows.size or kind == "F32":
        return reference(blocks, kind)
    call = "::dequantize(raw, y, (size_t)raw_shape[0] * ((WIDTH + 7) / 8));"
    blocks_of_threads = min(-(-rows.shape[0] * -(-K // 8) // 256), 32 * card.limits().processors)
    (y,) = cuda_kernel.kernel("dequantize", call, ("raw",), ("y",), _macros(kind, K, arranged))(
        [rows], [((*blocks.shape[:-1], K), mx.float32)], (blocks_of_threads,))
    return y


def _macros(kind: str, width: int, arranged: bool) -> tuple[tuple[str, int | str], ...]:
    return ("KIND", BLOCK_TYPES[kind].type_id), ("WIDTH", width), ("OUT", "float"), ("ARRANGED", int(arranged))


def metal(blocks: mx.array, kind: str) -> mx.array:
    layout, rows = BLOCK_TYPES[kind], int(np.prod(blocks.shape[:-1]))
    K = blocks.shape[-1] // layout.bytes * layout.weights
    if K % 32 or not rows:
        return reference(blocks, kind)   # no matrix of a model; F32 and F16 rows of any width have a decoder
    groups = -(-rows * (K // 32) // THREADS)
    (y,) = kernel("dequantize", "rows", ("blocks", "rows"), ("y",))(
        [blocks, rows], [((*blocks.shape[:-1], K), mx.float32)], (groups, 1, 1), (THREADS, 1, 1),
        [("KIND", layout.type_id), ("K", K)])
    return y


def _split(blocks: mx.array, size: int) -> mx.array:
    return blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // size, size)


def _flat(weights: mx.array, rank: int) -> mx.array:
    return weights.reshape(*weights.shape[:rank - 1], -1)


def _half(two_bytes: mx.array) -> mx.array:
    """[..., 2] u8 -> [..., 1] f32."""
    return mx.contiguous(two_bytes).view(mx.float16).astype(mx.float32)


def _f32(blocks: mx.array) -> mx.array:
    return blocks.view(mx.float32)


def _f16(blocks: mx.array) -> mx.array:
    return blocks.view(mx.float16).astype(mx.float32)


def _bf16(blocks: mx.array) -> mx.array:
    return blocks.view(mx.bfloat16).astype(mx.float32)


def _q8_0(blocks: mx.array) -> mx.array:
    b = _split(blocks, 34)
    return _flat(b[..., 2:].view(mx.int8).astype(mx.float32) * _half(b[..., :2]), blocks.ndim)


def _q2_k(blocks: mx.array) -> mx.array:
    b = _split(blocks, 84)
    scale, codes = b[..., :16], b[..., 16:80]
    shift = mx.array([[0], [2], [4], [6]], mx.uint8)
    q = codes.reshape(*b.shape[:-1], 2, 1, 32) >> shift & 3                     # [..., half, quarter, 32]
    q = q.reshape(*b.shape[:-1], 16, 16).astype(mx.float32)                     # sub-block, weight
    d = (scale & 15).astype(mx.float32) * _half(b[..., 80:82])
    m = (scale >> 4).astype(mx.float32) * _half(b[..., 82:84])
    return _flat(d[..., None] * q - m[..., None], blocks.ndim)


def _q4_k(blocks: mx.array) -> mx.array:
    b = _split(blocks, 144)
    s, codes = b[..., 4:16], b[..., 16:]
    low, mid, high = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = mx.concatenate([low & 63, high & 15 | (low >> 6) << 4], axis=-1).astype(mx.float32)
    least = mx.concatenate([mid & 63, high >> 4 | (mid >> 6) << 4], axis=-1).astype(mx.float32)
    shift = mx.array([[0], [4]], mx.uint8)
    q = codes.reshape(*b.shape[:-1], 4, 1, 32) >> shift & 15                    # [..., quarter, half, 32]
    q = q.reshape(*b.shape[:-1], 8, 32).astype(mx.float32)
    d, m = scale * _half(b[..., :2]), least * _half(b[..., 2:4])
    return _flat(d[..., None] * q - m[..., None], blocks.ndim)


@cache
def _signed_grid() -> mx.array:
    """[256 * 128, 8] f32: grid row g under sign code c at 128 g + c, so that one gather decodes 8 weights. 1 MiB."""
    grid, signs = mx.array(IQ2_GRID).astype(mx.float32), mx.array(IQ2_SIGNS).astype(mx.float32)
    return (grid[:, None] * signs[None]).reshape(-1, 8)


def _iq2_xxs(blocks: mx.array) -> mx.array:
    b = _split(blocks, 66)
    words = mx.contiguous(b[..., 2:]).view(mx.uint32).reshape(*b.shape[:-1], 8, 2)
    a, signs = words[..., :1], words[..., 1:]
    lane = mx.arange(4, dtype=mx.uint32)
    index = (a >> (8 * lane) & 255) * 128 + (signs >> (7 * lane) & 127)         # [..., group, lane]
    scale = (0.5 + (signs >> 28).astype(mx.float32)) * 0.25 * _half(b[..., :2])[..., None]
    return _flat(_signed_grid()[index] * scale[..., None], blocks.ndim)


def _mxfp4(blocks: mx.array) -> mx.array:
    b = _split(blocks, 17)
    codes = mx.concatenate([b[..., 1:] & 15, b[..., 1:] >> 4], axis=-1)
    # 2^(e - 128) from its bits, and the other half with the codes: e = 255 alone is past float32.
    e = b[..., :1].astype(mx.uint32)
    half = mx.where(e > 1, (mx.maximum(e, 1) - 1) << 23, mx.where(e > 0, 0x00400000, 0x00200000)).astype(mx.uint32)
    return _flat(mx.array(2 * E2M1)[codes] * half.view(mx.float32), blocks.ndim)


_DECODERS = {"F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q4_K": _q4_k,
             "IQ2_XXS": _iq2_xxs, "MXFP4": _mxfp4}
