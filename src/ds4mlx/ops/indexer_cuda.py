"""The indexer on CUDA: queries rounded as rows are, held in halves; scores of the rows that are seen; the best."""
import mlx.core as mx

from ds4mlx.cuda_port.source import Defines
from ds4mlx.ops.cuda_kernel import kernel, zeros
from ds4mlx.ops.paged import Paged

ROWS = 128              # that a block scores
CHUNK_QUERIES = 16      # that it takes to them, of a chunk
WHOLE = 1 << 30         # rows of the only page


def fits(H: int, W: int, P: int) -> bool:
    return W % 128 == 0 and W & (W - 1) == 0 and H <= ROWS and P % 2 == 0


def queries(q, cos, sin, packed):
    T, H, W = q.shape
    (turned,) = kernel("indexer_topk", "::queries(q, cosine, sine, turned, q_shape[0]);", ("q", "cosine", "sine"),
                       ("turned",), _macros(H, W, 2 * cos.shape[1], packed, 1))(
        [q, cos, sin], [((T, H, W), mx.float16 if packed else mx.float32)], (-(-T * H // 8),))
    return turned


def scores(q, weight, rows, scale, positions):
    (T, H, W), C = q.shape, rows.shape[0]
    queries = CHUNK_QUERIES if T > 1 else 1
    call = (f"::scores(q, weight, rows, pages, 0, positions, found, rows_shape[0], q_shape[0], {queries}, 0, "
            f"{float(scale)!r}f);")
    (found,) = kernel("indexer_topk", call, ("q", "weight", "rows", "pages", "positions"), ("found",),
                      _macros(H, W, 0, True, WHOLE))(
        [q, weight, rows, zeros(1), positions], [((T, C), mx.float32)], (-(-C // ROWS), -(-T // queries)))
    return found


def scores_step(q, weight, rows: Paged, most, scale, positions):
    (B, H, W), width = q.shape, rows.most
    call = (f"::scores(q, weight, rows, pages, pages_shape[1], positions, found, pages_shape[1] * {rows.page_rows}, "
            f"q_shape[0], 1, 0, {float(scale)!r}f);")
    (found,) = kernel("indexer_topk", call, ("q", "weight", "rows", "pages", "positions"), ("found",),
                      _macros(H, W, 0, True, rows.page_rows))(
        [q, weight, rows.rows, rows.pages, positions], [((B, width), mx.float32)], (-(-most // ROWS), B))
    return found[:, :most] if most < width else found


def select(scores, positions, ratio, k):
    call = f"::choose(scores, positions, chosen, scores_shape[1], {k});"
    macros = _macros(64, 128, 0, True, 1)   # of the kernels beside it, which must compile; it has none of these sizes
    (chosen,) = kernel("indexer_topk", call, ("scores", "positions"), ("chosen",), macros, 1024)(
        [scores, positions], [((scores.shape[0], k), mx.int32)], (scores.shape[0],))
    return chosen


def _macros(H: int, W: int, R: int, packed: bool, page_rows: int) -> Defines:
    row = W // 2 + W // 32 if packed else 4 * W
    return ("H", H), ("W", W), ("R", R), ("PACKED", int(packed)), ("ROW", row), ("PAGE_ROWS", page_rows)
