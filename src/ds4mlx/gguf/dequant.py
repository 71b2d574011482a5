"""Weights of GGUF blocks in plain NumPy: the reference behind every other decoder.

All decoders give the correctly rounded float32 of the format's formula: each product of a half-precision scale and a
code is exact in float32, so at most one rounding (the subtraction of a minimum) happens, whatever the order.
"""
from collections.abc import Callable

import numpy as np

from ds4mlx.gguf.blocks import BLOCK_TYPES

# The IQ2_XXS codebook: 256 rows of 8 codes, one 16-bit word a row, two bits a code, code 0 first.
_IQ2_ROWS = """
0000000200050008000a00110014002000220028002a00410044005000580061006400800082008a00a20101010401100115014001840198
020002020222028204010404041004210424044004420448046004810484049004a405000502050805200546056905800591060906100640
068406a40800080508080814082808410844085008520888090409400a020a14100110041010102110401060108410901095110011081120
1150115a1180122412451400140814201425144914801518156216001616180118041810184018811900190519a01a5120002002200a2044
20612080208221292148220022022401240424102440245625002541256426902808282028942a4440014004401040184021402440404048
4056406040814084409041004120416141804185420142104248425642684400440844204480449945124524460048014804481048404845
49004958496149824a454a9050005008501150195020508050885104514251a4529154905492550a56015654580058115819586459405a08
6004601060406068610061556218626064006405651065126584684280008002800a80418082810481188140821184018404841084158440
8460850085468594860986408660880289048a11900490109024904090a1911691809245940094229444955198819920a002a050a085a109
a200a418a850a904
"""


def _iq2_grid() -> np.ndarray:
    words = np.frombuffer(bytes.fromhex(_IQ2_ROWS), ">u2")
    codes = words[:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    grid: np.ndarray = np.array([8, 25, 43], np.int8)[codes]
    return grid


def _iq2_signs() -> np.ndarray:
    """Sign code c is bits 0..6; bit 7 makes the number of minus signs even."""
    bits = np.arange(128)[:, None] >> np.arange(8) & 1
    bits[:, 7] = bits.sum(axis=1) % 2
    return (1 - 2 * bits).astype(np.int8)


IQ2_GRID: np.ndarray = _iq2_grid()      # i8 [256, 8], values 8, 25, 43
IQ2_SIGNS: np.ndarray = _iq2_signs()    # i8 [128, 8], values +1, -1
E2M1: np.ndarray = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code

# Row c * 256 + g is grid row g under sign code c: one gather decodes 8 weights. 1 MiB, built in a millisecond.
_SIGNED_GRID = (IQ2_SIGNS[:, None] * IQ2_GRID[None]).reshape(-1, 8).astype(np.float32)
_SLAB_BLOCKS = 2048  # of 256 weights: scratch and output of a slab stay in the cache


def dequantize(raw: np.ndarray, kind: str) -> np.ndarray:
    """The weights of rows of blocks.

    raw [..., row bytes] u8, each row whole blocks of the GGUF type `kind`. Returns [..., weights per row], float32,
    or int32 for I32; F32 and I32 share memory with `raw` where they can. Raises ValueError for an unknown kind or
    a row of partial blocks.
    """
    block = BLOCK_TYPES.get(kind)
    if block is None:
        raise ValueError(f"no decoder for {kind}, have {', '.join(BLOCK_TYPES)}")
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % block.bytes:
        raise ValueError(f"{kind} rows are uint8 blocks of {block.bytes} bytes, got {raw.dtype} {raw.shape}")
    raw = np.ascontiguousarray(raw)
    if kind in _SCALARS:
        return _SCALARS[kind](raw)
    width = raw.shape[-1] // block.bytes * block.weights
    blocks = raw.reshape(-1, block.bytes)
    out = np.empty((len(blocks), block.weights), np.float32)
    slab = _SLAB_BLOCKS * 256 // block.weights
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale gives infinite weights, not a warning
        for start in range(0, len(blocks), slab):
            _DECODERS[kind](blocks[start:start + slab], out[start:start + slab])
    return out.reshape(*raw.shape[:-1], width)


def _half(two_bytes: np.ndarray) -> np.ndarray:
    """[n, 2] u8 -> [n, 1] f32."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def _bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    """w = d q."""
    np.multiply(b[:, 2:].view(np.int8), _half(b[:, :2]), out=out)


def _q2_k(b: np.ndarray, out: np.ndarray) -> None:
    """w = d (s & 15) q - dmin (s >> 4), a scale byte s for 16 weights; weight 128 a + 32 b + l is in byte 32 a + l."""
    codes = np.empty((len(b), 2, 4, 32), np.uint8)
    for quarter in range(4):
        np.right_shift(b[:, 16:80].reshape(-1, 2, 32), 2 * quarter, out=codes[:, :, quarter])
    codes &= 3
    scale = (b[:, :16] & 15) * _half(b[:, 80:82])
    least = (b[:, :16] >> 4) * _half(b[:, 82:84])
    _affine(codes, scale, least, out)


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    """w = d S q - dmin M, six-bit S and M for 32 weights; weight 64 a + 32 b + l is in byte 32 a + l."""
    codes = np.empty((len(b), 4, 2, 32), np.uint8)
    packed = b[:, 16:].reshape(-1, 4, 32)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1) * _half(b[:, :2])
    least = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=1) * _half(b[:, 2:4])
    _affine(codes, scale, least, out)


def _affine(codes: np.ndarray, scale: np.ndarray, least: np.ndarray, out: np.ndarray) -> None:
    """out = scale * codes - least, one scale and one minimum for each run of weights."""
    runs = out.reshape(*scale.shape, -1)
    np.multiply(codes.reshape(runs.shape), scale[..., None], out=runs)
    runs -= least[..., None]


def _iq2_xxs(b: np.ndarray, out: np.ndarray) -> None:
    """w = d (0.5 + s) / 4 * grid row * signs; a group of 32 weights is 4 grid bytes and a word of 4 signs and s."""
    groups = np.ascontiguousarray(b[:, 2:]).reshape(-1, 8, 8)
    word = groups[..., 4:].copy().view("<u4")[..., 0]
    row = np.empty((len(b), 8, 4), np.intp)
    for lane in range(4):
        row[..., lane] = (word >> 7 * lane & 127) << 8
    row |= groups[..., :4]
    np.take(_SIGNED_GRID, row.reshape(-1), axis=0, out=out.reshape(-1, 8), mode="clip")  # "raise" would buffer
    scale = (_half(b[:, :2]) * 0.25) * (0.5 + (word >> 28).astype(np.float32))
    runs = out.reshape(-1, 8, 32)
    runs *= scale[..., None]


def _mxfp4(b: np.ndarray, out: np.ndarray) -> None:
    """w = 2^(e - 127) E2M1(code); low nibbles first, then high ones."""
    np.take(E2M1, b[:, 1:] & 15, out=out[:, :16], mode="clip")
    np.take(E2M1, b[:, 1:] >> 4, out=out[:, 16:], mode="clip")
    # Twice, by 2^(e - 128) and 2: e = 255 is past float32, though half of some of its values is not.
    half = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    out *= 2
    out *= half


_SCALARS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda raw: raw.view("<f4"),
    "I32": lambda raw: raw.view("<i4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": _bf16,
}
_DECODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q8_0": _q8_0, "Q2_K": _q2_k, "Q4_K": _q4_k, "IQ2_XXS": _iq2_xxs, "MXFP4": _mxfp4,
}
