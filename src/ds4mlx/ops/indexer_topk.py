"""Which compressed rows a query may attend to: scores of the indexer, and the k best of them."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick


def index_scores(q: mx.array, weight: mx.array, rows: mx.array) -> mx.array:
    """score[t, c] = sum_h weight[t, h] relu(q[t, h] . rows[c]).

    q [T, H, W]; weight [T, H], may be negative; rows [C, W]. Returns [T, C] f32. Needs T * H * C floats at once:
    callers bound T.
    """
    return pick(scores_reference)(q, weight, rows)


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k largest of each row, in ascending order; of equal scores the lower index wins.

    scores [T, C] f32 without NaN, -inf allowed; 0 < k <= C < 2^31. Returns [T, k] i32.
    """
    if not 0 < k <= scores.shape[-1]:
        raise ValueError(f"top_k: {k} of {scores.shape[-1]}")
    return pick(top_k_reference)(scores, k)


def scores_reference(q, weight, rows):
    dots = mx.maximum(q.astype(mx.float32) @ rows.astype(mx.float32).T, 0)     # [T, H, C]
    return (weight[:, None] @ dots)[:, 0]


def top_k_reference(scores, k):
    # One integer key holds the score's order above and the index below, so equal scores cannot tie.
    bits = (scores + 0.0).view(mx.int32)                                       # + 0.0: -0 equals 0
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    key = (ordered << 31) - mx.arange(scores.shape[-1], dtype=mx.int64)
    best = mx.argpartition(-key, kth=k - 1, axis=-1)[..., :k]
    return mx.sort(best.astype(mx.int32), axis=-1)
