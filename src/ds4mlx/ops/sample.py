"""The next tokens from the logits, in one fixed order of steps, each driven by one uniform number."""
import mlx.core as mx
import numpy as np

from ds4mlx.ops import native, native_step
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.ranking import ranks

COLDEST = 1e-30  # colder changes nothing, and float32 takes far colder for 0: the best token alone is left
HOTTEST = 1e30   # hotter changes nothing either: whatever is not -inf is equal
ONE = 2.0 ** 40  # the best token's weight: weights are whole numbers, so that their sums are exact in any order
THREADS = 512     # as many as tokens that the kernel resolves at once: FEW

PerRow = mx.array | np.ndarray


def sample(logits: mx.array, uniform: PerRow, temperature: PerRow, top_k: PerRow, min_p: PerRow,
           top_p: PerRow) -> mx.array:
    """One token id for each row of logits [B, V] f32 (-inf where forbidden, one of a row finite at least), [B] i32.

    All but the logits [B], in NumPy's arrays or MLX's: top_k i32, the others f32. temperature <= 0 or top_p = 0: the
    argmax, lowest id on ties. Else divide by the temperature, keep the top_k (0: all), softmax, drop p < min_p * max p,
    keep the smallest set of best tokens with sum >= top_p (one at least), renormalise, and invert the cumulative sum at
    `uniform` in [0, 1). Best first, and of equal logits the lower id. Below 2^-40 of the best a token counts as
    impossible. Raises ValueError for parameters of another shape.
    """
    parameters = uniform, temperature, top_k, min_p, top_p
    if any(p.shape != logits.shape[:1] for p in parameters):
        raise ValueError(f"sample: logits {logits.shape} with parameters {[p.shape for p in parameters]}")
    if isinstance(temperature, np.ndarray) and isinstance(top_p, np.ndarray) and _greedy(temperature, top_p).all():
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    uniform, temperature, min_p, top_p = (mx.array(p, mx.float32) for p in (uniform, temperature, min_p, top_p))
    top_k = mx.array(top_k, mx.int32)
    return pick(reference, metal=metal, native=cpu)(logits, uniform, temperature, top_k, min_p, top_p)


def reference(logits, uniform, temperature, top_k, min_p, top_p):
    B, V = logits.shape
    greedy = _greedy(temperature, top_p)
    uniform, heat, top_k, min_p, top_p = (p[:, None] for p in (uniform, temperature, top_k, min_p, top_p))
    order = mx.argsort(ranks(logits), axis=-1)
    x = mx.take_along_axis(logits, order, axis=-1)
    gap = mx.where(x == x[:, :1], 0, x - x[:, :1])  # best first; before the division, so that it overflows to -inf only
    p = mx.exp(gap / mx.clip(heat, COLDEST, HOTTEST))                           # of the best token's probability
    p = mx.where((top_k > 0) & (mx.arange(V) >= top_k), 0, p)
    total = mx.cumsum((p * ONE).astype(mx.int64), axis=-1)
    kept = mx.where(p >= min_p, total, 0).max(axis=-1, keepdims=True)
    enough = mx.maximum((total[:, -1:].astype(mx.float32) * top_p).astype(mx.int64), 1)
    reached = mx.minimum((total < enough).sum(axis=-1, keepdims=True), V - 1)
    kept = mx.where(top_p < 1, mx.minimum(kept, mx.take_along_axis(total, reached, axis=-1)), kept)
    # Rounding may leave uniform * kept at kept itself: the last token with weight, never one without.
    target = mx.minimum((kept.astype(mx.float32) * uniform).astype(mx.int64), kept - 1)
    place = (total <= mx.where(greedy[:, None], 0, target)).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(order, place, axis=-1)[:, 0].astype(mx.int32)


def cpu(logits, uniform, temperature, top_k, min_p, top_p):
    run = native_step.sample if native.built() else reference
    return run(logits, uniform, temperature, top_k, min_p, top_p)


def metal(logits, uniform, temperature, top_k, min_p, top_p):
    B, V = logits.shape
    threads = min(THREADS, -(-V // 32) * 32)
    names = ("logits", "top_k", "uniform", "temperature", "min_p", "top_p")
    (tokens,) = kernel("sample", "choose", names, ("tokens",))(
        [logits, top_k, uniform, temperature, min_p, top_p], [((B,), mx.int32)], (B, 1, 1), (threads, 1, 1),
        [("V", V), ("BITS", (V - 1).bit_length())])
    return tokens


def _greedy(temperature: PerRow, top_p: PerRow) -> PerRow:
    return (temperature <= 0) | (top_p <= 0)
