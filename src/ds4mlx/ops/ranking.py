"""One order for scores, best first, with nothing left to chance: of equal scores the lower index comes first."""
import mlx.core as mx


def ranks(scores: mx.array) -> mx.array:
    """int64 keys that no two scores of a row share, the smaller the better.

    scores [..., C] f32 without NaN, -inf allowed; C < 2^31. The score's bits lie above the index's.
    """
    bits = (scores + 0.0).view(mx.int32)                                       # + 0.0: -0 equals 0
    ascending = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    return mx.arange(scores.shape[-1], dtype=mx.int64) - (ascending << 31)
