"""Hyper-connections on CUDA: the streams mixed, and what the next half layer reads of them."""
import mlx.core as mx

from ds4mlx.cuda_port.source import Defines
from ds4mlx.ops.cuda_kernel import kernel
from ds4mlx.ops.weights import Blocks

FEW_TOKENS = 16     # up to here a token's channels are shared out to blocks
CHUNK_TOKENS, CHANNELS = 8, 64
QUADS = 256         # of channels, for a block that reads the streams
# A chunk's kernel mixes in place, each block its own tokens: they are brought there first, and the numbers of their
# updates, which the next ones replace.
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
    make = _chunk if streams.shape[0] > FEW_TOKENS else _step
    return make(streams, fn, update, scale, base, norm, f"{float(hc_eps)!r}f, {float(norm_eps)!r}f", iterations)


def leave(streams, fn, update, scale, base, norm, hc_eps, norm_eps):
    return enter(streams, fn, update, scale, base, norm, 0, hc_eps, norm_eps)[0]


def _step(streams, fn, update, scale, base, norm, numbers, iterations):
    """Sums by blocks, then all else. In one launch it would take clusters, which `cuda_kernel` does without."""
    (T, N, D), M = streams.shape, fn.shape[0]
    pairs = 2 * CHANNELS if D % (4 * CHANNELS) == 0 else CHANNELS
    parts = D // (2 * pairs)
    macros = *_sizes(streams, fn), ("PAIRS", pairs), ("PARTS", parts)
    names, outputs = ("streams", "fn"), {"sums": (T, parts, M + N * N)}
    if update:
        names, outputs = (*names, "y", "post", "m"), {**outputs, "after": streams.shape}
    call = f"::parts(streams, (const Pair*)fn, {'y, post, m, after' if update else '0, 0, 0, 0'}, sums);"
    sums, *after = _launch(call, names, [streams, fn.raw, *(update or ())], outputs, macros, (parts, T), N * pairs)
    mixed = after[0] if after else streams
    outputs = {"x": (T, D), **({"post": (T, N), "m": (T, N, N)} if M > N else {})}
    call = (f"::enter(streams, sums, scale, base, norm, {iterations}, {numbers}, x, "
            f"{'post, m' if M > N else '0, 0'});")
    x, *back = _launch(call, ("streams", "sums", "scale", "base", "norm"), [mixed, sums, scale, base, norm], outputs,
                       macros, (-(-D // (4 * QUADS)) + (M > N), T), QUADS)
    return x, mixed, *back


def _chunk(streams, fn, update, scale, base, norm, numbers, iterations):
    (T, N, D), M = streams.shape, fn.shape[0]
    names, outputs = ("streams", "fn", "scale", "base", "norm"), {"x": (T, D), "post": (T, N), "m": (T, N, N)}
    if update:
        names, outputs = (*names, "y", "old_post", "old_m"), {**outputs, "after": streams.shape}
    moved = "after, (const Pair*)fn, y, post, m, 1" if update else "(float*)streams, (const Pair*)fn, 0, post, m, 0"
    call = (f"{TAKE_TOKENS if update else ''}::mix({moved}, scale, base, norm, {numbers}, x, (float*)0, "
            f"streams_shape[0], {iterations});")
    x, post, m, *after = _launch(call, names, [streams, fn.raw, scale, base, norm, *(update or ())], outputs,
                                 (*_sizes(streams, fn), ("STEP", 0)), (-(-T // CHUNK_TOKENS),), 256, 2,
                                 4 * (CHUNK_TOKENS + 8 * -(-M // 8)) * (N * CHANNELS + 4))
    return x, after[0] if after else streams, post, m


def _launch(call: str, names: tuple[str, ...], inputs: list[mx.array], outputs: dict[str, tuple[int, ...]],
            macros: Defines, grid: tuple[int, ...], threads: int, blocks: int = 1,
            shared_bytes: int = 0) -> list[mx.array]:
    launch = kernel("hyper_mix", call, names, tuple(outputs), macros, threads, blocks, shared_bytes)
    return launch(inputs, [(shape, mx.float32) for shape in outputs.values()], grid)


def _sizes(streams: mx.array, fn: Blocks) -> Defines:
    _, N, D = streams.shape
    return ("N", N), ("D", D), ("M", fn.shape[0]), ("FN_HALF", int(fn.kind == "F16"))
