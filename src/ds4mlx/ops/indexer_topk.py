"""Which compressed rows a query may attend to: the indexer's queries, its scores of the rows, and the k best of them.

Queries and rows are float32, or packed as `kv_round.fp4_pack` writes them (uint8: E2M1 codes, then the powers of two
of 32 channels each). Both of one call are held the same way, and the dtype tells which.
"""
import mlx.core as mx

from ds4mlx.ops import kv_round
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.rope_tail import reference as rope_reference


def index_queries(q: mx.array, cos: mx.array, sin: mx.array, packed: bool) -> mx.array:
    """q rotated on its last 2P channels; if `packed`, then Hadamard transformed and rounded to FP4, as rows are.

    q [T, H, W] f32, W a power of two of at least 32; cos, sin [T, P] f32, one row a token. Returns [T, H, W] f32 or
    [T, H, W/2 + W/32] u8. Raises ValueError when W < 2P or the tokens differ.
    """
    if q.shape[0] != cos.shape[0] or q.shape[-1] < 2 * cos.shape[-1]:
        raise ValueError(f"index_queries: q {q.shape} with tables {cos.shape}")
    return pick(queries_reference)(q, cos, sin, packed)


def index_scores(q: mx.array, weight: mx.array, rows: mx.array, scale: float = 1.0) -> mx.array:
    """score[t, c] = scale * sum_h weight[t, h] relu(q[t, h] . rows[c]).

    q [T, H, W] and rows [C, W], both f32 or both packed; weight [T, H], may be negative. Returns [T, C] f32; callers
    bound T * C. Raises ValueError when q and rows are not held alike.
    """
    if q.shape[-1] != rows.shape[-1] or q.dtype != rows.dtype:
        raise ValueError(f"index_scores: queries {q.shape} {q.dtype}, rows {rows.shape} {rows.dtype}")
    return pick(scores_reference)(q, weight, rows, scale)


def select_rows(scores: mx.array, start: int, ratio: int, k: int) -> mx.array:
    """Indices of the k best rows that each query sees, ascending; of equal scores the lower index wins.

    Query t sees the rows c < (start + t + 1) // ratio. Where it sees fewer than k, it gets them all and then the
    lowest of the others. scores [T, C] f32 without NaN, -inf allowed, -0 equals 0; 0 < k <= C < 2^31. Returns
    [T, k] i32. Raises ValueError for another k.
    """
    if not 0 < k <= scores.shape[-1]:
        raise ValueError(f"select_rows: {k} of {scores.shape[-1]} rows")
    return pick(select_reference)(scores, start, ratio, k)


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices of the k largest of each row, in ascending order; of equal scores the lower index wins.

    scores [T, C] f32 without NaN, -inf allowed; 0 < k <= C < 2^31. Returns [T, k] i32.
    """
    if not 0 < k <= scores.shape[-1]:
        raise ValueError(f"top_k: {k} of {scores.shape[-1]}")
    return pick(top_k_reference)(scores, k)


def queries_reference(q, cos, sin, packed):
    turned = rope_reference(q, cos, sin)
    return kv_round.fp4_pack(turned) if packed else turned


def scores_reference(q, weight, rows, scale):
    if rows.dtype == mx.uint8:
        width = rows.shape[-1] * 32 // 17                                      # a half byte each, a byte for 32
        q, rows = kv_round.fp4_unpack(q, width), kv_round.fp4_unpack(rows, width)
    # One query at a time: the dots of all its heads are H times as large as the scores.
    return mx.concatenate([weight[t:t + 1] @ mx.maximum(q[t] @ rows.T, 0) for t in range(q.shape[0])]) * scale


def select_reference(scores, start, ratio, k):
    seen = (start + 1 + mx.arange(scores.shape[0])) // ratio
    hidden = mx.arange(scores.shape[1]) >= seen[:, None]
    return _best(mx.where(hidden, -2 ** 31, _ordered(scores)), k)              # below -inf


def top_k_reference(scores, k):
    return _best(_ordered(scores), k)


def _ordered(scores: mx.array) -> mx.array:
    """int32 in the order of the floats."""
    bits = (scores + 0.0).view(mx.int32)                                       # + 0.0: -0 equals 0
    return mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _best(order: mx.array, k: int) -> mx.array:
    # One integer key holds the order above and the index below, so equal scores cannot tie.
    key = (order.astype(mx.int64) << 31) - mx.arange(order.shape[-1], dtype=mx.int64)
    best = mx.argpartition(-key, kth=k - 1, axis=-1)[..., :k]
    return mx.sort(best.astype(mx.int32), axis=-1)
