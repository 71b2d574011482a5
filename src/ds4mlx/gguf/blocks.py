"""Block layout of every tensor type that a model may hold: how many weights a block covers, in how many bytes.

A row of `width` weights is `width / weights` consecutive blocks; blocks never cross rows.
"""
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """One GGUF tensor type."""
    name: str
    type_id: int    # in the tensor directory
    weights: int    # weights that one block covers
    bytes: int      # size of one block


BLOCK_TYPES: dict[str, BlockType] = {block.name: block for block in (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q8_0", 8, 32, 34),       # f16 d, i8 q[32]
    BlockType("Q2_K", 10, 256, 84),     # u8 scale and minimum nibbles [16], u8 codes [64], f16 d, f16 dmin
    BlockType("Q4_K", 12, 256, 144),    # f16 d, f16 dmin, u8 six-bit scales and minima [12], u8 codes [128]
    BlockType("IQ2_XXS", 16, 256, 66),  # f16 d, 8 groups of (u8 grid rows [4], u32 scale and signs)
    BlockType("I32", 26, 1, 4),
    BlockType("BF16", 30, 1, 2),
    BlockType("MXFP4", 39, 32, 17),     # u8 exponent, u8 codes [16]
)}
BY_ID: dict[int, BlockType] = {block.type_id: block for block in BLOCK_TYPES.values()}


def row_bytes(kind: str, width: int) -> int:
    """Bytes of one row of `width` weights. Raises ValueError for an unknown kind or a width of partial blocks."""
    block = BLOCK_TYPES.get(kind)
    if block is None:
        raise ValueError(f"no block layout for {kind}, have {', '.join(BLOCK_TYPES)}")
    if width <= 0 or width % block.weights:
        raise ValueError(f"a row of {width} weights is not a whole number of {kind} blocks of {block.weights}")
    return width // block.weights * block.bytes
