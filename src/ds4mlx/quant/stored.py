"""Numbers as checkpoints store them, to float32: BF16, FP8 with a scale for 128 x 128, FP4 with one for 32.

An E8M0 byte e is 2^(e - 127). FP4 codes lie two to a byte, the first in the low nibble.
"""
import numpy as np

from ds4mlx.gguf.dequant import E2M1

FP8_BLOCK = 128
FP4_GROUP = 32


def _e4m3() -> np.ndarray:
    """Value by code; 0x7F and 0xFF are no numbers."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


def _e8m0() -> np.ndarray:
    powers = np.ldexp(1.0, np.arange(256) - 127)
    powers[255] = np.nan
    return powers.astype(np.float32)  # 2^-127 is subnormal, and exact


E4M3: np.ndarray = _e4m3()  # f32 [256]
E8M0: np.ndarray = _e8m0()  # f32 [256]
# A byte -> its two weights, as one number of 64 bits: gathered faster than rows of two are.
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1).view(np.uint64)[:, 0]


def plain(raw: np.ndarray, dtype: str) -> np.ndarray:
    """raw u8 [..., bytes of a row] -> values [..., elements]: float32, or int64 for whole numbers."""
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F32", "F16"):
        return raw.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)
    if dtype in ("I32", "I64"):
        return raw.view("<i4" if dtype == "I32" else "<i8").astype(np.int64)
    if dtype == "F8_E8M0":
        return E8M0[raw]
    assert dtype == "F8_E4M3", dtype
    return E4M3[raw]


def fp8(codes: np.ndarray, scale: np.ndarray, first: int = 0) -> np.ndarray:
    """Rows of a matrix, from row `first` on.  codes u8 [N, K]; scale f32 of the whole matrix, one for 128 x 128."""
    rows = (np.arange(first, first + len(codes))) // FP8_BLOCK
    columns = np.arange(codes.shape[1]) // FP8_BLOCK
    return E4M3[codes] * scale[rows][:, columns]


def fp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """packed u8 [N, K / 2]; scale u8 E8M0 [N, K / 32]. Returns f32 [N, K]."""
    weights = np.take(_PAIRS, packed, mode="clip").view(np.float32).reshape(*scale.shape, FP4_GROUP)
    weights *= E8M0[scale][..., None]
    return weights.reshape(len(packed), -1)


def mxfp4_blocks(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The same weights, bit for bit, as GGUF's MXFP4 blocks u8 [N, K / 32 * 17].

    A block is the scale, then codes 0 to 15 in low nibbles with 16 to 31 in the high ones of the same bytes.
    """
    rows = packed.reshape(*scale.shape, FP4_GROUP // 2)
    codes = np.stack([rows & 15, rows >> 4], axis=-1).reshape(*scale.shape, FP4_GROUP)
    blocks = np.concatenate([scale[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return blocks.reshape(len(packed), -1)
