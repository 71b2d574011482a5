"""Which compressed rows a query may attend to: the indexer's queries, its scores of the rows, and the k best of them.

Queries and rows are float32, or packed as `kv_round.fp4_pack` writes them (uint8: E2M1 codes, then the powers of two
of 32 channels each). Both of one call are held the same way, and the dtype tells which.
"""
import mlx.core as mx

from ds4mlx.ops import indexer_cuda, kv_round, native, native_step
from ds4mlx.ops.dispatch import exact, pick
from ds4mlx.ops.kernel import Input, kernel
from ds4mlx.ops.paged import Paged
from ds4mlx.ops.ranking import ranks
from ds4mlx.ops.rope_tail import reference as rope_reference

QUERIES = 16          # that a threadgroup takes to its rows, which it decodes once for all
DOTS = 1 << 22        # floats that the reference holds at once
TILE = 32             # vectors in threadgroup memory
TILE_BYTES = 20_000   # that they may take there, beside the products of 8 heads


def index_queries(q: mx.array, cos: mx.array, sin: mx.array, packed: bool) -> mx.array:
    """q rotated on its last 2P channels; if `packed`, then Hadamard transformed and rounded to FP4, as rows are.

    q [T, H, W] f32, W a power of two of at least 32; cos, sin [T, P] f32, one row a token. Returns [T, H, W] f32, or
    if packed [T, H, W/2 + W/32] u8; on CUDA [T, H, W] f16 then, the same numbers, which halves hold without loss.
    Raises ValueError when W < 2P or the tokens differ.
    """
    if q.shape[0] != cos.shape[0] or q.shape[-1] < 2 * cos.shape[-1]:
        raise ValueError(f"index_queries: q {q.shape} with tables {cos.shape}")
    cuda = indexer_cuda.queries if indexer_cuda.fits(*q.shape[1:], cos.shape[1]) else None
    return pick(queries_reference, metal=queries_metal, cuda=cuda, native=queries_cpu)(q, cos, sin, packed)


def index_scores(q: mx.array, weight: mx.array, rows: mx.array, scale: float = 1.0,
                 positions: mx.array | None = None) -> mx.array:
    """score[t, c] = scale * sum_h weight[t, h] relu(q[t, h] . rows[c]).

    q [T, H, W] and rows [C, W], both f32 or both packed; weight [T, H], may be negative. Returns [T, C] f32; callers
    bound T * C. With positions i32 [T], consecutive ones of tokens that see a row for every four tokens, entries may be
    anything where a token does not see the row. Raises ValueError when q and rows are not held alike.
    """
    if not _alike(q, rows):
        raise ValueError(f"index_scores: queries {q.shape} {q.dtype}, rows {rows.shape} {rows.dtype}")
    cuda = indexer_cuda.scores if q.dtype == mx.float16 and positions is not None else None
    run = pick(scores_reference, metal=scores_metal, cuda=cuda, native=scores_cpu)
    return run(q, weight, rows, scale, positions)


def index_scores_step(q: mx.array, weight: mx.array, rows: Paged, most: int, scale: float = 1.0,
                      positions: mx.array | None = None) -> mx.array:
    """`index_scores` of one query of each of B sequences, of the first `most` rows of its own.

    q [B, H, W] and the pool's rows [.., W], both f32 or both packed; weight [B, H]. Returns [B, most] f32, anything for
    rows that a sequence does not hold, or does not see by positions i32 [B] as above. Raises ValueError when q and rows
    do not fit.
    """
    if not _alike(q, rows.rows):
        raise ValueError(f"index_scores_step: queries {q.shape} {q.dtype}, rows {rows.rows.shape} {rows.rows.dtype}")
    if rows.pages.shape[0] != q.shape[0] or not 0 < most <= rows.most:
        raise ValueError(f"index_scores_step: {most} rows of {q.shape[0]} sequences, page tables {rows.pages.shape} of "
                         f"{rows.page_rows} rows a page")
    cuda = indexer_cuda.scores_step if q.dtype == mx.float16 and positions is not None else None
    run = pick(scores_step_reference, metal=scores_step_metal, cuda=cuda, native=scores_step_cpu)
    return run(q, weight, rows, most, scale, positions)


def _alike(q: mx.array, rows: mx.array) -> bool:
    """Halves are packed queries, unpacked."""
    if q.dtype == mx.float16:
        return rows.dtype == mx.uint8 and kv_round.pack_bytes(q.shape[-1], 0, "fp4") == rows.shape[-1]
    return q.shape[-1] == rows.shape[-1] and q.dtype == rows.dtype


def select_rows(scores: mx.array, positions: mx.array, ratio: int, k: int) -> mx.array:
    """Indices of the k best rows that each query sees, ascending; of equal scores the lower index wins.

    The query at positions[t] sees the rows c < (positions[t] + 1) // ratio. Where it sees fewer than k, it gets them
    all and then the lowest of the others. scores [T, C] f32, of what is seen none NaN, -inf allowed, -0 equals 0;
    positions i32 [T]; 0 < k <= C < 2^31. Returns [T, k] i32. Raises ValueError for another k or other positions.
    """
    if not 0 < k <= scores.shape[-1] or positions.shape != scores.shape[:1]:
        raise ValueError(f"select_rows: {k} of {scores.shape[-1]} rows, scores {scores.shape} at positions "
                         f"{positions.shape}")
    cuda = indexer_cuda.select if ratio == 4 else None
    return pick(select_reference, metal=select_metal, cuda=cuda)(scores, positions, ratio, k)


def queries_reference(q, cos, sin, packed):
    turned = rope_reference(q, cos, sin)
    return kv_round.fp4_pack(turned) if packed else turned


def queries_cpu(q, cos, sin, packed):
    T, H, W = q.shape
    form = native_step.Rows(W, 2 * cos.shape[1], "fp4" if packed else None)
    if not form.fits() or q.size == 0:
        return queries_reference(q, cos, sin, packed)
    return mx.array(native_step.make_rows(q.reshape(T * H, W), form, None, 0.0, cos, sin)).reshape(T, H, -1)


def scores_cpu(q, weight, rows, scale, positions):
    return scores_reference(q, weight, rows, scale, positions, native.product)


def scores_reference(q, weight, rows, scale, positions, product=mx.matmul):
    if rows.dtype == mx.uint8:
        width = rows.shape[-1] * 32 // 17                                      # a half byte each, a byte for 32
        q, rows = _unpacked(q, width), kv_round.fp4_unpack(rows, width)
    T, H, W = q.shape
    at_once = max(1, DOTS // (H * rows.shape[0]))                               # dots are H times as many as scores
    parts = []
    for t in range(0, T, at_once):
        dots = product(q[t:t + at_once].reshape(-1, W), rows.T).reshape(-1, H, rows.shape[0])
        parts.append((weight[t:t + at_once, None] @ mx.maximum(dots, 0))[:, 0])
        if at_once < T:
            mx.eval(parts[-1])
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts)) * scale


def _unpacked(q: mx.array, width: int) -> mx.array:
    return kv_round.fp4_unpack(q, width) if q.dtype == mx.uint8 else q.astype(mx.float32)


def scores_step_cpu(q, weight, rows, most, scale, positions):
    packing = "fp4" if q.dtype == mx.uint8 else None
    form = native_step.Rows(q.shape[-1] * 32 // 17 if packing else q.shape[-1], 0, packing)
    if form.fits() and weight.shape[1] <= native_step.MOST_HEADS:
        return native_step.scores(q, weight, rows, most, scale, form)
    return scores_step_reference(q, weight, rows, most, scale, positions, native.product)


def scores_step_reference(q, weight, rows, most, scale, positions, product=mx.matmul):
    width = q.shape[-1] * 32 // 17 if q.dtype == mx.uint8 else q.shape[-1]
    q = _unpacked(q, width)
    B, H = weight.shape
    at_once = max(1, DOTS // (B * max(H, width)))                               # of each sequence's rows
    parts = []
    for c in range(0, most, at_once):
        some = rows.at(mx.arange(c, min(c + at_once, most)))
        some = kv_round.fp4_unpack(some, width) if some.dtype == mx.uint8 else some
        dots = product(q, some.swapaxes(1, 2))                                  # [B, H, rows]
        parts.append((weight[:, None] @ mx.maximum(dots, 0))[:, 0])
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)) * scale


def select_reference(scores, positions, ratio, k):
    seen = (positions + 1) // ratio
    hidden = mx.arange(scores.shape[1]) >= seen[:, None]
    behind = (1 << 62) + mx.arange(scores.shape[1], dtype=mx.int64)             # behind the rank of -inf
    order = mx.where(hidden, behind, ranks(scores))
    return mx.sort(mx.argpartition(order, kth=k - 1, axis=-1)[..., :k].astype(mx.int32), axis=-1)


def queries_metal(q, cos, sin, packed):
    T, H, W = q.shape
    P, lanes = cos.shape[1], W // 4
    if T * H == 0 or W % 4 or P % 2 or lanes & (lanes - 1) or not (16 if packed else 1) <= lanes <= 32:
        return queries_reference(q, cos, sin, packed)
    groups = -(-T * H * lanes // 128)
    width, dtype = (kv_round.pack_bytes(W, 0, "fp4"), mx.uint8) if packed else (W, mx.float32)
    (turned,) = kernel("indexer_topk", "queries", ("q", "cosine", "sine", "vectors"), ("turned",))(
        [q, cos, sin, T * H], [((groups * 128 // lanes, width), dtype)], (groups, 1, 1), (128, 1, 1),
        [("H", H), ("W", W), ("P", P), ("PACKED", packed)])
    return turned[:T * H].reshape(T, H, width)


def scores_metal(q, weight, rows, scale, positions):
    (T, H, _), C = q.shape, rows.shape[0]
    if T * C == 0 or not _has_kernel(rows):
        return scores_reference(q, weight, rows, scale, positions)
    queries = T if T <= 8 else QUERIES
    return _launch_scores({"q": q, "weight": weight, "rows": rows, "scale": float(scale), "tokens": T, "count": C,
                           "queries": queries})


def scores_step_metal(q, weight, rows, most, scale, positions):
    if not _has_kernel(rows.rows) or rows.page_rows % TILE:
        return scores_step_reference(q, weight, rows, most, scale, positions)
    return _launch_scores({"q": q, "weight": weight, "rows": rows.rows, "scale": float(scale), "tokens": q.shape[0],
                           "count": most, "queries": 1, "pages": rows.pages, "held": rows.pages.shape[1],
                           "page_rows": rows.page_rows})


def _has_kernel(rows: mx.array) -> bool:
    W, number, _ = _form(rows)
    return W % (64 if rows.dtype == mx.uint8 else 8) == 0 and TILE * (W * number.size + 16) <= TILE_BYTES


def _form(rows: mx.array) -> tuple[int, mx.Dtype, int]:
    """Channels of the rows, the numbers that tiles hold of them, and tiles of rows that a threadgroup takes.

    Halves hold FP4 vectors exactly; floats they would round, and then other rows could win.
    """
    packed = rows.dtype == mx.uint8
    W = rows.shape[1] * 32 // 17 if packed else rows.shape[1]
    return (W, mx.float16, 2) if packed and not exact() else (W, mx.float32, 1)


def _launch_scores(inputs: dict[str, Input]) -> mx.array:
    W, number, columns = _form(inputs["rows"])
    T, C, queries = inputs["tokens"], inputs["count"], inputs["queries"]
    launch = kernel("indexer_topk", "scores", tuple(inputs), ("scores",), (("PAGED", int("pages" in inputs)),))
    (scores,) = launch(list(inputs.values()), [((T, C), mx.float32)],
                       (-(-C // (TILE * columns)), -(-T // queries), 1), (128, 1, 1),
                       [("H", inputs["q"].shape[1]), ("W", W), ("COLUMNS", columns), ("Number", number)])
    return scores


def select_metal(scores, positions, ratio, k):
    T, C = scores.shape
    (rows,) = kernel("indexer_topk", "select", ("scores", "positions", "ratio", "count", "width"), ("rows",))(
        [scores, positions, ratio, k, C], [((T, k), mx.int32)], (T, 1, 1), (1024, 1, 1))
    return rows
