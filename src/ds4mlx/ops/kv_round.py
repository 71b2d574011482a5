"""The two roundings that are part of the model, and the packed rows that hold their results without loss.

An attention row of D channels with a rotary tail of R is D - R codes of E4M3, an exponent for each 64 of them, a zero
byte if the exponents are odd in number, and R float16. An indexer row of W channels is W/2 bytes of E2M1 codes, the
even channel in the low nibble, and an exponent for each 32 channels. An exponent e is E8M0: 2^(e - 127).
"""
from typing import Literal

import mlx.core as mx
import numpy as np

FP8_BLOCK, FP8_MAX = 64, 448.0
FP4_BLOCK, FP4_MAX = 32, 6.0
HALF_MAX = 65504.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Packing = Literal["fp8", "fp4"]


def pack(row: mx.array, packing: Packing | None, tail: int) -> mx.array:
    """What a cache holds of a rotated row [..., D] f32: attention's "fp8", the indexer's "fp4", or the row itself."""
    if packing is None:
        return row
    return fp8_pack(row, tail) if packing == "fp8" else fp4_pack(row)


def pack_bytes(width: int, tail: int, packing: Packing = "fp8") -> int:
    """Bytes of a packed row of `width` channels; an indexer row ("fp4") packs its tail like the rest."""
    if packing == "fp4":
        return width // 2 + width // FP4_BLOCK
    exponents = (width - tail) // FP8_BLOCK
    return width - tail + exponents + exponents % 2 + 2 * tail


def fp8_pack(row: mx.array, tail: int) -> mx.array:
    """E4M3 codes of all but the last `tail` channels, with the least power of two that fits each 64; float16 of those.

    row [..., D] f32, |row| < 2^127, D - tail a multiple of 64. scale = 2^ceil(log2(max(max|block|, 1e-4) / 448)); codes
    are block / scale to the nearest, ties to even. The tail is clamped to ±65504, so what is finite stays so.
    Returns [..., pack_bytes(D, tail)] u8. Raises ValueError for another D.
    """
    plain = row.shape[-1] - tail
    if plain < FP8_BLOCK or plain % FP8_BLOCK:
        raise ValueError(f"fp8_pack: {plain} channels before a tail of {tail}, needed a multiple of {FP8_BLOCK}")
    block, exponent = _scaled(row[..., :plain], FP8_BLOCK, FP8_MAX, least=1e-4)
    codes = mx.to_fp8(block).reshape(*row.shape[:-1], plain)
    pad = mx.zeros((*row.shape[:-1], exponent.shape[-1] % 2), mx.uint8)
    half = mx.contiguous(mx.clip(row[..., plain:], -HALF_MAX, HALF_MAX).astype(mx.float16)).view(mx.uint8)
    return mx.concatenate([codes, exponent, pad, half], axis=-1)


def fp8_unpack(packed: mx.array, width: int, tail: int) -> mx.array:
    """The rows [..., width] f32 that `fp8_pack` wrote."""
    plain = width - tail
    count = plain // FP8_BLOCK
    codes, exponent, _, half = mx.split(packed, [plain, plain + count, plain + count + count % 2], axis=-1)
    block = mx.from_fp8(codes, mx.float32).reshape(*packed.shape[:-1], count, FP8_BLOCK) * _power(exponent)
    rest = mx.contiguous(half).view(mx.float16).astype(mx.float32)
    return mx.concatenate([block.reshape(*packed.shape[:-1], plain), rest], axis=-1)


def fp4_pack(v: mx.array) -> mx.array:
    """Hadamard transform times W^-1/2, then E2M1 codes with the least power of two that fits 32 of them.

    v [..., W] f32, |v| < 2^126 / W, W a power of two of at least 32.
    scale = 2^ceil(log2(max(max|block|, 6 * 2^-126) / 6)); codes are block / scale to the nearest of 0, 0.5, 1, 1.5, 2,
    3, 4, 6, ties to the even code.
    Returns [..., W/2 + W/32] u8. Raises ValueError for another W.
    """
    width = v.shape[-1]
    if width < FP4_BLOCK or width & (width - 1):
        raise ValueError(f"fp4_pack: {width} channels, needed a power of two of at least {FP4_BLOCK}")
    block, exponent = _scaled(mx.hadamard_transform(v), FP4_BLOCK, FP4_MAX, least=FP4_MAX * 2.0 ** -126)
    size = mx.abs(block)
    # Steps of 1/2 below 2, of 1 below 4, of 2 above: mx.round is half-to-even, which is the even code in each range.
    code = mx.where(size < 2, mx.round(size * 2), mx.where(size < 4, 2 + mx.round(size), 4 + mx.round(size / 2)))
    code = (code.astype(mx.uint8) | mx.where(block < 0, 8, 0).astype(mx.uint8)).reshape(v.shape)
    return mx.concatenate([code[..., 0::2] | code[..., 1::2] << 4, exponent], axis=-1)


def fp4_unpack(packed: mx.array, width: int) -> mx.array:
    """The vectors [..., width] f32, transformed, that `fp4_pack` wrote."""
    pairs, exponent = mx.split(packed, [width // 2], axis=-1)
    codes = mx.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*packed.shape[:-1], -1, FP4_BLOCK)
    return (mx.array(E2M1)[codes] * _power(exponent)).reshape(*packed.shape[:-1], width)


def _scaled(v: mx.array, block: int, top: float, least: float) -> tuple[mx.array, mx.array]:
    """v in blocks [..., blocks, block], over each block's scale and clamped to ±top; the exponents u8 [..., blocks]."""
    v = v.reshape(*v.shape[:-1], -1, block)
    bits = pow2_ceil(mx.maximum(mx.abs(v).max(axis=-1), least) / top).view(mx.uint32)
    exponent = (bits >> 23).astype(mx.uint8)
    return mx.clip(v / _power(exponent), -top, top), exponent


def _power(exponent: mx.array) -> mx.array:
    """2^(e - 127), [..., blocks] u8 -> [..., blocks, 1] f32, for the exponents 1 … 254 that rows hold."""
    return (exponent.astype(mx.uint32) << 23).view(mx.float32)[..., None]


def pow2_ceil(x: mx.array) -> mx.array:
    """The smallest power of two that is >= x, from the bits: exact on every device.  x f32, normal and positive."""
    bits = x.view(mx.uint32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(mx.float32)
