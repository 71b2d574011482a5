"""y = x W^T over matrices kept in their GGUF blocks: one, or several that share their input."""
from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ds4mlx.cuda_port.forms import BLOCK, TILE_ROWS as CUDA_ROWS, DenseForm
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.ops import card, cuda_kernel, native
from ds4mlx.ops.dequantize import decoded
from ds4mlx.ops.dispatch import exact, pick
from ds4mlx.ops.kernel import Size, Template, kernel
from ds4mlx.ops.weights import Blocks

SLAB_WEIGHTS = 1 << 25   # 128 MiB of float32: bounds what the output matrix (530 M weights) needs at once
DECODE_TOKENS = 8        # up to here a lane holds every token's activations
DECODE_ROWS = 4          # of a matrix, for each set of simdgroups in decode
SIMDGROUPS = 4           # of a threadgroup
TILE_ROWS = 64           # of a matrix, for a threadgroup in prefill
MATRICES = 8             # at most, in one launch
CUDA_THREADS = 512
CUDA_TOKENS = 16         # up to here CUDA multiplies blocks as they are; more tokens by whole matrices in float32
KERNEL_KINDS = {"F32", "F16", "BF16", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"}  # those of blocks.h


def dense_matmul(x: mx.array, w: Blocks, groups: int = 1) -> mx.array:
    """y[..., n] = sum_k x[..., k] W[n, k], in float32.

    x [..., K] float; w of [N, row bytes]. With `groups` G > 1, x is [..., G K] and W's rows are G consecutive blocks
    of N / G, block g applied to columns g K … g K + K - 1 of x. Returns [..., N] f32.
    Raises ValueError when the shapes do not go together.
    """
    n, k = w.shape[0], x.shape[-1]
    if n % groups or k % groups:
        raise ValueError(f"dense_matmul: {n} rows in {groups} groups over x {x.shape}")
    y = pick(reference, metal=metal, cuda=cuda, native=cpu)(x.reshape(-1, k), w, groups)
    return y.reshape(*x.shape[:-1], n)


def dense_matmuls(x: mx.array, ws: Sequence[Blocks]) -> list[mx.array]:
    """[x W^T for each W], in float32; on Metal in one launch, on CUDA too for a few tokens.

    x [T, K] float; ws of [N_i, row bytes], of any kinds. Returns [T, N_i] f32 each.
    """
    return pick(reference_each, metal=metal_each, cuda=cuda_each)(x, ws)


def reference(x: mx.array, w: Blocks, groups: int = 1) -> mx.array:
    """x [T, G K], w of [N, row bytes]. Returns [T, N]."""
    size, width = w.shape[0] // groups, x.shape[1] // groups
    parts = [_product(x[:, g * width:(g + 1) * width], Blocks(w.raw[g * size:(g + 1) * size], w.kind, w.arranged))
             for g in range(groups)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def reference_each(x: mx.array, ws: Sequence[Blocks]) -> list[mx.array]:
    return [dense_matmul(x, w) for w in ws]


def cpu(x: mx.array, w: Blocks, groups: int) -> mx.array:
    T, width = x.shape[0], x.shape[1] // groups
    return mx.array(native.matmul(native.array(x).reshape(T, groups, width), w.host(), w.kind, groups))


def metal(x: mx.array, w: Blocks, groups: int) -> mx.array:
    return _launch(x, [w], groups)[0] if _fits(x, [w], groups) else reference(x, w, groups)


def metal_each(x: mx.array, ws: Sequence[Blocks]) -> list[mx.array]:
    return _launch(x, ws) if _fits(x, ws) else reference_each(x, ws)


def cuda(x: mx.array, w: Blocks, groups: int) -> mx.array:
    return _cuda_products(x, [w], groups)[0]


def cuda_each(x: mx.array, ws: Sequence[Blocks]) -> list[mx.array]:
    return _cuda_products(x, ws)


def _cuda_products(x: mx.array, ws: Sequence[Blocks], groups: int = 1) -> list[mx.array]:
    """[T, N_i] for each matrix: those that there is a kernel for in launches of MATRICES, the rest decoded."""
    few = 0 < x.shape[0] <= CUDA_TOKENS and x.shape[1] // groups % BLOCK == 0
    fast = [few and (w.kind == "F16" or w.arranged) and w.shape[0] // groups % CUDA_ROWS == 0 for w in ws]
    floats, done = x.astype(mx.float32), []
    ready = [w for w, is_fast in zip(ws, fast, strict=True) if is_fast]
    for start in range(0, len(ready), MATRICES):
        done += _cuda_launch(floats, ready[start:start + MATRICES], groups)
    fast_ones = iter(done)
    return [next(fast_ones) if is_fast else product_decoded(x, w, groups)
            for w, is_fast in zip(ws, fast, strict=True)]


def product_decoded(x: mx.array, w: Blocks, groups: int) -> mx.array:
    """`reference`, with all groups of rows decoded and multiplied at once where a slab holds them."""
    T, K = x.shape[0], x.shape[1] // groups
    if groups == 1 or w.shape[0] * K > SLAB_WEIGHTS:
        return reference(x, w, groups)
    by_group = decoded(w).reshape(groups, -1, K).swapaxes(1, 2)
    return (x.astype(mx.float32).reshape(T, groups, K).swapaxes(0, 1) @ by_group).swapaxes(0, 1).reshape(T, -1)


def _cuda_launch(x: mx.array, ws: Sequence[Blocks], groups: int) -> list[mx.array]:
    """x [T, G K] in as many parts as shared memory wants; [T, N_i] for each matrix."""
    kinds, limits, K = frozenset(w.kind for w in ws), card.limits(), x.shape[1] // groups
    most = DenseForm.of(K, x.shape[0], kinds, limits).vectors
    parts = []
    for start in range(0, x.shape[0], most):
        some = x[start:start + most]
        form, rows = DenseForm.of(K, some.shape[0], kinds, limits), tuple(w.shape[0] // groups for w in ws)
        numbers = range(len(ws))
        call = _job(tuple((BLOCK_TYPES[w.kind].type_id, n) for w, n in zip(ws, rows, strict=True)), groups)
        launch = cuda_kernel.kernel("dense_matmul", call, ("x", *(f"w{i}" for i in numbers)),
                                    tuple(f"y{i}" for i in numbers), form.defines, CUDA_THREADS,
                                    2 if form.vectors <= 8 else 1, form.shared_bytes)
        parts.append(launch([some, *(w.raw for w in ws)], [((some.shape[0], w.shape[0]), mx.float32) for w in ws],
                            form.grid(sum(rows) // CUDA_ROWS, groups, limits)))
    return parts[0] if len(parts) == 1 else [mx.concatenate(ys) for ys in zip(*parts, strict=True)]


@cache
def _job(matrices: tuple[tuple[int, int], ...], groups: int) -> str:
    """The call of dense_matmul.cu's `decode` for matrices of these types and rows of a group."""
    lines, end = [f"Job job = {{}}; job.count = {len(matrices)}; job.tokens = x_shape[0]; job.groups = {groups};"], 0
    for i, (kind, rows) in enumerate(matrices):
        end += rows // CUDA_ROWS
        lines.append(f"job.weights[{i}] = w{i}; job.out[{i}] = y{i}; job.kinds[{i}] = {kind}; job.rows[{i}] = {rows}; "
                     f"job.ends[{i}] = {end};")
    return "\n".join([*lines, "::decode(x, job);"])


def _fits(x: mx.array, ws: Sequence[Blocks], groups: int = 1) -> bool:
    """Whether there are kernels: for rows of whole runs of 32 weights, of types that blocks.h has."""
    return (x.size > 0 and x.shape[1] // groups % 32 == 0 and 0 < len(ws) <= MATRICES
            and all(w.kind in KERNEL_KINDS for w in ws))


def _launch(x: mx.array, ws: Sequence[Blocks], G: int = 1) -> list[mx.array]:
    """x [T, G K]; [T, N_i] for each matrix."""
    T, K = x.shape[0], x.shape[1] // G
    numbers, rows = range(len(ws)), [w.shape[0] // G for w in ws]
    entry, groups, form = _decode_form(T, G, K, rows) if T <= DECODE_TOKENS else _prefill_form(T, G, rows)
    template = [*form, ("K", K), ("GROUPS", G), ("CODEBOOK", any(w.kind == "IQ2_XXS" for w in ws))]
    for i, w in enumerate(ws):
        template += [(f"KIND{i}", BLOCK_TYPES[w.kind].type_id), (f"N{i}", rows[i])]
    launch = kernel("dense_matmul", entry, ("x", "tokens", *(f"w{i}" for i in numbers)),
                    tuple(f"y{i}" for i in numbers), (("MATRICES", len(ws)),))
    return launch([x.astype(mx.float32), T, *(w.raw for w in ws)], [((T, G * n), mx.float32) for n in rows], groups,
                  (32 * SIMDGROUPS, 1, 1), template)


def _decode_form(tokens: int, groups: int, k: int, rows: list[int]) -> tuple[str, Size, Template]:
    """Kernel, threadgroups and template arguments."""
    held = 1 << (tokens - 1).bit_length()
    # Long rows are split, for there are few; not for several tokens, for each threadgroup reads them all again.
    split = max(1, (4 if k >= 4096 else 2 if k >= 2048 else 1) // held)
    tiles = sum(-(-n // (SIMDGROUPS // split * DECODE_ROWS)) for n in rows)
    return "decode", (tiles, groups, 1), [("TOKENS", held), ("SPLIT", split)]


def _prefill_form(tokens: int, groups: int, rows: list[int]) -> tuple[str, Size, Template]:
    """Kernel, threadgroups and template arguments."""
    of_tile = 32 if tokens <= 32 else 64
    tiles = sum(-(-n // TILE_ROWS) for n in rows)
    return ("prefill", (-(-tokens // of_tile), tiles, groups),
            [("S", mx.float32 if exact() else mx.float16), ("BM", of_tile)])


def _product(x: mx.array, w: Blocks) -> mx.array:
    x = x.astype(mx.float32)
    rows = max(1, SLAB_WEIGHTS // x.shape[-1])
    if w.shape[0] <= rows:
        return x @ decoded(w).T
    parts = []
    for start in range(0, w.shape[0], rows):
        parts.append(x @ decoded(w, slice(start, start + rows)).T)
        mx.eval(parts[-1])  # or all decoded slabs would be alive at once
    return mx.concatenate(parts, axis=-1)
