"""Hyper-connections on CUDA: the streams mixed, and what the next half layer reads of them, in one pass."""
import mlx.core as mx

from ds4mlx.cuda_port.forms import MOST_CLUSTER, hyper_shares
from ds4mlx.cuda_port.source import Defines
from ds4mlx.ops.cuda_kernel import clusters, kernel, limits
from ds4mlx.ops.weights import Blocks

FEW_TOKENS = 16     # up to here a token's channels are shared out to blocks
CHUNK_TOKENS, CHANNELS = 8, 64
# Kernels mix in place, each block its own part: it is brought there first. Of a step: some channels of its tokens.
TAKE_CHANNELS = """
const int each = N * PASSES * PAIRS;
for (int i = threadIdx.x; i < TOKENS * each; i += blockDim.x) {
    int t = blockIdx.y * TOKENS + i / each, n = i % each / (PASSES * PAIRS);
    size_t at = ((size_t)t * N + n) * (D / 2) + blockIdx.x * (PASSES * PAIRS) + i % (PASSES * PAIRS);
    if (t < streams_shape[0]) ((float2*)after)[at] = ((const float2*)streams)[at];
}
__syncthreads();
"""
# Of a chunk: all of its tokens, and the numbers of their updates, which the next ones replace.
TAKE_TOKENS = """
const size_t each = N * D / 4, first = blockIdx.x * 8 * each, end = min(first + 8 * each, streams_shape[0] * each);
for (size_t i = first + threadIdx.x; i < end; i += blockDim.x) ((float4*)after)[i] = ((const float4*)streams)[i];
for (int i = threadIdx.x; i < 8 * (N + N * N); i += blockDim.x) {
    int t = blockIdx.x * 8 + i / (N + N * N), j = i % (N + N * N);
    if (t >= streams_shape[0]) continue;
    if (j < N) post[t * N + j] = old_post[t * N + j];
    else m[t * N * N + j - N] = old_m[t * N * N + j - N];
}
__syncthreads();
"""


def fits(streams: mx.array, fn: Blocks) -> bool:
    T, N, D = streams.shape
    return T > 0 and N in (2, 4) and D % (2 * CHANNELS) == 0 and fn.kind in ("F16", "F32")


def enter(streams, fn, update, scale, base, norm, iterations, hc_eps, norm_eps):
    (T, N, _), sizes = streams.shape, _sizes(streams, fn)
    numbers = f"{float(hc_eps)!r}f, {float(norm_eps)!r}f"
    if T > FEW_TOKENS:
        return _chunk(streams, fn, update, scale, base, norm, numbers, iterations)
    x, after, sums = _step(streams, fn, update, scale, base, norm, numbers)
    call = (f"::WayBack back = {{sums, scale, base, {iterations}, {numbers}, post, m}};\n"
            "if (threadIdx.x == 0) ::way_back<N, D>(back, blockIdx.x);")
    post, m = kernel("hyper_mix", call, ("sums", "scale", "base"), ("post", "m"), (*sizes, ("STEP", 0)), 32)(
        [sums, scale, base], [((T, N), mx.float32), ((T, N, N), mx.float32)], (T,))
    return x, after, post, m


def leave(streams, fn, update, scale, base, norm, hc_eps, norm_eps):
    numbers = f"{float(hc_eps)!r}f, {float(norm_eps)!r}f"
    if streams.shape[0] > FEW_TOKENS:
        return _chunk(streams, fn, update, scale, base, norm, numbers, 0)[0]
    return _step(streams, fn, update, scale, base, norm, numbers)[0]


def _step(streams, fn, update, scale, base, norm, numbers):
    """x, the streams, and the sums [T, M + N N] of which the way back is made."""
    (T, N, D), M, sizes = streams.shape, fn.shape[0], _sizes(streams, fn)
    cluster, pairs = hyper_shares(D, MOST_CLUSTER if clusters() else 1)
    tokens = 1 if T * cluster <= limits().processors // 2 else 2
    sizes += (("STEP", 1), ("CLUSTER", cluster), ("PAIRS", pairs), ("PASSES", D // (2 * pairs * cluster)),
              ("TOKENS", tokens))
    outputs = {"x": (T, D), "sums": (T, M + N * N), **({"after": streams.shape} if update else {})}
    moved = "after, (const Pair*)fn, y, old_post, old_m, 1" if update else \
        "(float*)streams, (const Pair*)fn, 0, 0, 0, 0"
    call = (TAKE_CHANNELS if update else "") \
        + f"::mix({moved}, scale, base, norm, {numbers}, x, sums, streams_shape[0]);"
    x, sums, *after = _launch(streams, fn, update, scale, base, norm, call, outputs, sizes, N * pairs, 1, 0, cluster,
                              (cluster, -(-T // tokens)))
    return x, after[0] if after else streams, sums


def _chunk(streams, fn, update, scale, base, norm, numbers, iterations):
    (T, N, D), M = streams.shape, fn.shape[0]
    outputs = {"x": (T, D), "post": (T, N), "m": (T, N, N), **({"after": streams.shape} if update else {})}
    moved = "after, (const Pair*)fn, y, post, m, 1" if update else "(float*)streams, (const Pair*)fn, 0, post, m, 0"
    call = (TAKE_TOKENS if update else "") + (f"::mix({moved}, scale, base, norm, {numbers}, x, (float*)0, "
                                              f"streams_shape[0], {iterations});")
    shared = 4 * (CHUNK_TOKENS + 8 * -(-M // 8)) * (N * CHANNELS + 4)
    x, post, m, *after = _launch(streams, fn, update, scale, base, norm, call, outputs,
                                 (*_sizes(streams, fn), ("STEP", 0)), 256, 2, shared, 1, (-(-T // CHUNK_TOKENS),))
    return x, after[0] if after else streams, post, m


def _launch(streams: mx.array, fn: Blocks, update, scale: mx.array, base: mx.array, norm: mx.array, call: str,
            outputs: dict[str, tuple[int, ...]], macros: Defines, threads: int, blocks: int, shared_bytes: int,
            cluster: int, grid: tuple[int, ...]) -> list[mx.array]:
    names = ("y", "old_post", "old_m") if update else ()
    launch = kernel("hyper_mix", call, ("streams", "fn", "scale", "base", "norm", *names), tuple(outputs), macros,
                    threads, blocks, shared_bytes, cluster)
    return launch([streams, fn.raw, scale, base, norm, *(update or ())],
                  [(shape, mx.float32) for shape in outputs.values()], grid)


def _sizes(streams: mx.array, fn: Blocks) -> Defines:
    _, N, D = streams.shape
    return ("N", N), ("D", D), ("M", fn.shape[0]), ("FN_HALF", int(fn.kind == "F16"))
