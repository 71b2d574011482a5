"""y = x W^T over matrices in their GGUF blocks: a few vectors straight from the blocks, many by the vendor's GEMM."""
import ctypes
from functools import cache

import numpy as np

from ds4mlx.cuda_port.build import compiled, kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import BLOCK, TILE_ROWS, BatchForm, DenseForm
from ds4mlx.cuda_port.launch import active_clusters, clusters, launch, limits, processors
from ds4mlx.cuda_port.ops.dequantize import dequantize, to_half
from ds4mlx.cuda_port.scratch import take
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import BLOCK_TYPES

DECODE_TOKENS = 16          # at most
FINE_TOKENS = 1024          # up to here 22 bits of x are multiplied: chunks of a prompt are longer, where it counts
MATRICES = 8                # at most, in one launch
THREADS = 512
FEW_TOKENS = 4              # up to here vectors are in shared memory (dense_matmul.cu), beyond in registers
SLAB_WEIGHTS = 1 << 26      # decoded at a time for GEMM


class _Job(ctypes.Structure):
    """`struct Job` of dense_matmul.cu."""
    _fields_ = [("weights", ctypes.c_void_p * MATRICES), ("out", ctypes.c_void_p * MATRICES),
                ("kinds", ctypes.c_int * MATRICES), ("rows", ctypes.c_int * MATRICES),
                ("ends", ctypes.c_int * MATRICES), ("count", ctypes.c_int), ("tokens", ctypes.c_int),
                ("groups", ctypes.c_int)]


class _BatchJob(ctypes.Structure):
    """`struct Job` of dense_batch.cuh."""
    _fields_ = [("weights", ctypes.c_void_p * MATRICES), ("out", ctypes.c_void_p * MATRICES),
                ("rows", ctypes.c_int * MATRICES), ("ends", ctypes.c_int * MATRICES), ("count", ctypes.c_int),
                ("tokens", ctypes.c_int), ("groups", ctypes.c_int), ("bytes_clusters", ctypes.c_int),
                ("bytes_count", ctypes.c_int), ("planes", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


def dense(x: "cp.ndarray", weights: list[Weight], out: list["cp.ndarray"], groups: int = 1,
          quality: bool = False) -> None:
    """out[i] = x W_i^T.

    x f32 [T, K] for matrices of [N_i, K]; out f32 [T, N_i]. With `groups` G, x is [T, G K], and G consecutive blocks of
    N_i / G rows apply to K columns each. Up to 16 tokens x has 16 bits (3e-5 of y), up to FINE_TOKENS 22. Beyond, it is
    rounded to halves (3e-4 of y), as W is for more than 16. With `quality` they are float32.
    """
    pairs = list(zip(weights, out, strict=True))
    if x.shape[0] > DECODE_TOKENS:
        if all(w.shape[1] % 8 == 0 for w in weights):
            parts = (x,) if quality else halved(x, x.shape[0] <= FINE_TOKENS)
            for w, y in pairs:
                many(parts, w, y, groups)
            return
        fast = []
    else:
        fast = [(w, y) for w, y in pairs if _fits(w, groups)]
    for start in range(0, len(fast), MATRICES):
        _decode(x, fast[start:start + MATRICES], groups)
    for w, y in pairs:
        if not any(w is done for done, _ in fast):
            plain(x, w, y, groups=groups)


def halved(x: "cp.ndarray", fine: bool = False) -> "tuple[cp.ndarray, ...]":
    """x in f16, until the next call; `fine`: in two parts that add up to 22 bits of it."""
    parts = tuple(take(name, x.shape, np.float16) for name in ("halves", "halves.rest")[:1 + fine])
    to_half(x, *parts)
    return parts


def plain(x: "cp.ndarray", w: Weight, out: "cp.ndarray", matrices: "cp.ndarray | None" = None, share: int = 1,
          groups: int = 1) -> None:
    """out f32 [V, N] = W x, in float32, whatever the type and shape; slow.

    `matrices` i32 [V] says which of a stack each vector is multiplied by; `share` results in turn have one vector.
    """
    assert not w.arranged, "rows in the order of the file"
    rows = w.shape[-2] // groups
    launch(kernel("dense_matmul", "plain", (("PLAIN", 1), ("KIND", BLOCK_TYPES[w.kind].type_id), ("K", w.shape[-1]))),
           (min(-(-out.size // 8), 64 * processors()),), (256,),
           [x, w.raw, matrices, out, rows, share, groups, ctypes.c_size_t(out.size)])


def _fits(w: Weight, groups: int) -> bool:
    """Whether `decode` takes it."""
    rows, width = w.shape
    readable = w.kind == "F16" or w.kind == "Q8_0" and w.arranged
    return readable and width % BLOCK == 0 and rows // groups % TILE_ROWS == 0


def _decode(x: "cp.ndarray", pairs: list[tuple[Weight, "cp.ndarray"]], groups: int) -> None:
    (tokens, _), k, kinds = x.shape, pairs[0][0].shape[1], frozenset(w.kind for w, _ in pairs)
    batch = _batch_form(k, tokens, [w for w, _ in pairs], groups) if tokens > FEW_TOKENS else None
    if batch:
        _launch_batch(x, pairs, groups, batch)
        return
    form = DenseForm.of(k, tokens, kinds, limits())
    for start in range(0, tokens, form.vectors):
        part = slice(start, start + form.vectors)
        _launch(x[part], [(w, y[part]) for w, y in pairs], groups, DenseForm.of(k, len(x[part]), kinds, limits()))


def dense_encoding(x: "cp.ndarray", weights: list[Weight], out: list["cp.ndarray"], planes: "cp.ndarray",
                   scales: "cp.ndarray") -> bool:
    """`dense` of matrices of Q8_0, whose kernel for more than a few tokens has x [T, K] in planes anyway and keeps
    them: planes u8 [T, 2, K], scales f32 [T, K / 256]. Returns whether that kernel ran."""
    tokens, k = x.shape
    form = _batch_form(k, tokens, weights, 1) if FEW_TOKENS < tokens <= DECODE_TOKENS else None
    if form is None or not all(w.kind == "Q8_0" and _fits(w, 1) for w in weights):
        dense(x, weights, out)
        return False
    _launch_batch(x, list(zip(weights, out, strict=True)), 1, form, (planes, scales))
    return True


def _batch_form(k: int, tokens: int, weights: list[Weight], groups: int) -> BatchForm | None:
    tiles = {"Q8_0": 0, "F16": 0}
    for w in weights:
        tiles[w.kind] += w.shape[0] // groups // TILE_ROWS
    return BatchForm.of(k, tokens, (tiles["Q8_0"], tiles["F16"]), groups, limits(), running_clusters())


def _launch_batch(x: "cp.ndarray", pairs: list[tuple[Weight, "cp.ndarray"]], groups: int, form: BatchForm,
                  kept: "tuple[cp.ndarray, cp.ndarray] | None" = None) -> None:
    pairs = sorted(pairs, key=lambda pair: pair[0].kind != "Q8_0")
    job, tiles = _BatchJob(count=len(pairs), tokens=x.shape[0], groups=groups), 0
    for i, (w, y) in enumerate(pairs):
        rows = w.shape[0] // groups
        tiles += rows // TILE_ROWS
        job.weights[i], job.out[i], job.rows[i], job.ends[i] = w.raw.data.ptr, y.data.ptr, rows, tiles
        job.bytes_count += w.kind == "Q8_0"
    if kept:
        job.planes, job.scales = (array.data.ptr for array in kept)
    job.bytes_clusters = form.bytes_clusters
    launch(kernel("dense_matmul", "batch", form.defines, form.shared_bytes), (form.clusters * form.shares, groups),
           (THREADS,), [x, job], form.shared_bytes)


@cache
def running_clusters() -> tuple[int, ...]:
    """How many clusters of 2, of 4 and of 8 blocks, one to a multiprocessor, run at once."""
    return tuple(_running(shares) for shares in (2, 4, 8)) if clusters() else ()


def _running(shares: int) -> int:
    form = BatchForm.sharing(shares, 4096, DECODE_TOKENS, (1, 0), 1, limits())
    return active_clusters(compiled("dense_matmul", "batch", form.defines, form.shared_bytes), shares, THREADS,
                           form.shared_bytes) if form else 0


def _launch(x: "cp.ndarray", pairs: list[tuple[Weight, "cp.ndarray"]], groups: int, form: DenseForm) -> None:
    job, tiles = _Job(count=len(pairs), tokens=x.shape[0], groups=groups), 0
    for i, (w, y) in enumerate(pairs):
        rows = w.shape[0] // groups
        tiles += rows // TILE_ROWS
        job.weights[i], job.out[i], job.kinds[i] = w.raw.data.ptr, y.data.ptr, BLOCK_TYPES[w.kind].type_id
        job.rows[i], job.ends[i] = rows, tiles
    launch(kernel("dense_matmul", "decode", form.defines, form.shared_bytes), form.grid(tiles, groups, limits()),
           (THREADS,), [x, job], form.shared_bytes)

def many(parts: "tuple[cp.ndarray, ...]", w: Weight, out: "cp.ndarray", groups: int = 1) -> None:
    """out = x W^T, x f16 or f32 [T, G K] the sum of its parts, W decoded by slabs of rows into their type; added up in
    float32."""
    n, k = w.shape[0] // groups, w.shape[1]
    slab = max(1, min(n, SLAB_WEIGHTS // k))
    for g in range(groups):
        for start in range(0, n, slab):
            count, row = min(slab, n - start), g * n + start
            if w.kind == "F16" and parts[0].dtype == np.float16:
                matrix = w.raw[row:row + count].view(np.float16)
            else:
                matrix = take("decoded", (count, k), parts[0].dtype)
                dequantize(w, row, matrix)
            for i, x in enumerate(parts):
                gemm(matrix, x[:, g * k:(g + 1) * k], out[:, row:row + count], add=i > 0)


def gemm(w: "cp.ndarray", x: "cp.ndarray", out: "cp.ndarray", add: bool = False) -> None:
    """out f32 [T, N] = x [T, K] W [N, K]^T, or is added to; both f16 or both f32; rows of x and out may be parts of
    longer ones."""
    from cupy_backends.cuda.libs import cublas
    kind = cp.cuda.runtime.CUDA_R_16F if w.dtype == np.float16 else cp.cuda.runtime.CUDA_R_32F
    handle = cp.cuda.device.get_cublas_handle()
    one, kept = np.ones(1, np.float32), np.full(1, add, np.float32)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    cublas.gemmEx(handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, w.shape[0], x.shape[0], w.shape[1], one.ctypes.data,
                  w.data.ptr, kind, w.shape[1], x.data.ptr, kind, x.strides[0] // x.itemsize, kept.ctypes.data,
                  out.data.ptr, cp.cuda.runtime.CUDA_R_32F, out.strides[0] // 4, cublas.CUBLAS_COMPUTE_32F,
                  cublas.CUBLAS_GEMM_DEFAULT)
