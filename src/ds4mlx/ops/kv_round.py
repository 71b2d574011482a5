"""The two roundings that are part of the model: FP8 on attention rows, Hadamard and FP4 on indexer vectors."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick

FP8_BLOCK, FP8_MAX = 64, 448.0
FP4_BLOCK, FP4_MAX = 32, 6.0


def fp8_round(row: mx.array, tail: int) -> mx.array:
    """E4M3 codes and a power-of-two scale for each 64 channels, decoded again; the last `tail` channels stay.

    row [..., D] f32, D - tail a multiple of 64. scale = 2^ceil(log2(max(max|block|, 1e-4) / 448)).
    Returns [..., D] f32.
    """
    return pick(fp8_reference)(row, tail)


def fp4_round(v: mx.array) -> mx.array:
    """Hadamard transform times D^-1/2, then E2M1 codes and a power-of-two scale for each 32 channels, decoded again.

    v [..., D] f32, D a power of two of at least 32. scale = 2^ceil(log2(max(max|block|, 6 * 2^-126) / 6)).
    Ties go to the even code. Returns [..., D] f32.
    """
    return pick(fp4_reference)(v)


def fp8_reference(row, tail):
    head, rest = mx.split(row, [row.shape[-1] - tail], axis=-1)
    block, scale = _scaled(head, FP8_BLOCK, FP8_MAX, least=1e-4)
    rounded = mx.from_fp8(mx.to_fp8(block), mx.float32) * scale
    return mx.concatenate([rounded.reshape(head.shape), rest], axis=-1)


def fp4_reference(v):
    block, scale = _scaled(mx.hadamard_transform(v), FP4_BLOCK, FP4_MAX, least=FP4_MAX * 2.0 ** -126)
    size = mx.abs(block)
    # Steps of 1/2 below 2, of 1 below 4, of 2 above: mx.round is half-to-even, which is the even code in each range.
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    rounded = mx.round(size / step) * step * mx.sign(block) * scale
    return rounded.reshape(v.shape)


def _scaled(v: mx.array, block: int, top: float, least: float) -> tuple[mx.array, mx.array]:
    """v in blocks, divided by each block's scale and clamped to ±top; the scale [..., blocks, 1]."""
    v = v.reshape(*v.shape[:-1], -1, block)
    scale = pow2_ceil(mx.maximum(mx.abs(v).max(axis=-1, keepdims=True), least) / top)
    return mx.clip(v / scale, -top, top), scale


def pow2_ceil(x: mx.array) -> mx.array:
    """The smallest power of two that is >= x, from the bits: exact on every device.  x f32, normal and positive."""
    bits = x.view(mx.uint32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(mx.float32)
