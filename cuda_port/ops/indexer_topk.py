"""Which compressed rows each query attends to, on layers of ratio 4."""
import numpy as np

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import BLOCK_OWN_BYTES
from ds4mlx.cuda_port.launch import clusters, launch, limits
from ds4mlx.cuda_port.sizes import Sizes, page_rows

ROWS = 128                # that a block scores
CHUNK_QUERIES = 16        # that it takes to them, of a chunk
SCORE_FLOATS = 1 << 26    # of [tokens, rows] at once: 256 MiB, whatever the context
CLUSTER = 8               # blocks that share a step's token
CLUSTER_SHARE = 0.85      # of the multiprocessors, at most: more clusters do not fit at once


def choose_rows(q: "cp.ndarray", weight: "cp.ndarray", table: "cp.ndarray", rows: "cp.ndarray", pages: "cp.ndarray",
                positions: "cp.ndarray", most: int, chosen: "cp.ndarray", sizes: Sizes) -> None:
    """chosen[t] = the k rows of the highest scores that token t sees, ascending, the lower of equal ones; all of them
    where it sees no more. score[c] = scale sum_h weight[h] relu(q[h] . rows[c]), q rotated, transformed and rounded.

    q f32 [T, H W], weight f32 [T, H]: products; table f32 [2, T, P]; rows u8, the pool; pages i32 [P] of one session,
    whose consecutive positions i32 [T] are, or [T, P] of as many; most: rows that any token may see; chosen i32 [T, k].
    """
    T, k = chosen.shape
    H, W, together = sizes.index_heads, sizes.index_dim, pages.ndim == 1
    scale = (H * W) ** -0.5
    defines = (("H", H), ("W", W), ("R", sizes.rotary), ("PACKED", int(sizes.packed)), ("ROW", sizes.index_row_bytes),
               ("PAGE_ROWS", page_rows(4)))
    if not together and sizes.packed and (share := _share(T, H, W, most)):
        shared = _pick_bytes(H, W, share)
        launch(kernel("indexer_topk", "pick", (*defines, ("CLUSTER", CLUSTER)), shared), (CLUSTER, T), (512,),
               (q, table[0], table[1], weight, rows, pages, pages.shape[1], positions, chosen, k, share, scale), shared)
        return
    turned = scratch.take("indexer.queries", (T, H, W), np.float16 if sizes.packed else np.float32)
    launch(kernel("indexer_topk", "queries", defines), (-(-T * H // 8),), (256,), (q, table[0], table[1], turned, T))
    at_once = T if T <= 16 else max(CHUNK_QUERIES, SCORE_FLOATS // most // CHUNK_QUERIES * CHUNK_QUERIES)
    queries = CHUNK_QUERIES if together and T > 1 else 1
    for t in range(0, T, at_once):
        part = slice(t, min(t + at_once, T))
        count = part.stop - t
        scores = scratch.take("indexer.scores", (count, most))
        launch(kernel("indexer_topk", "scores", defines), (-(-most // ROWS), -(-count // queries)), (256,),
            (turned[part], weight[part], rows, pages if together else pages[part],
             0 if together else pages.shape[1], positions[part], scores, most, count,
             queries, k, scale))
        launch(kernel("indexer_topk", "choose", defines), (count,), (1024,),
               (scores, positions[part], chosen[part], most, k))


def _share(tokens: int, heads: int, width: int, most: int) -> int:
    """Rows of a block where a cluster chooses for each token, of `most`; 0 where clusters do not hold them."""
    share = -(-most // CLUSTER // 16) * 16
    shared, card = _pick_bytes(heads, width, share), limits()
    together = 2 if 2 * (shared + BLOCK_OWN_BYTES) <= card.of_processor_bytes else 1
    fits = clusters() and shared <= card.of_block_bytes and heads <= 15 * CLUSTER
    return share if fits and tokens * CLUSTER <= CLUSTER_SHARE * card.processors * together else 0


def _pick_bytes(heads: int, width: int, share: int) -> int:
    """Shared memory of such a block."""
    heads = -(-heads // 16) * 16
    return 2 * (width + 8) * (share + heads) + 4 * heads + 4 * share * (CLUSTER + 1)
