"""The next token from the logits, in one fixed order of steps, driven by one uniform number."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.ranking import ranks

COLDEST = 1e-30  # colder changes nothing, and float32 takes far colder for 0: the best token alone is left
HOTTEST = 1e30   # hotter changes nothing either: whatever is not -inf is equal
ONE = 2.0 ** 40  # the best token's weight: weights are whole numbers, so that their sums are exact in any order
THREADS = 512     # as many as tokens that the kernel resolves at once: FEW


def sample(logits: mx.array, uniform: float, temperature: float, top_k: int, min_p: float, top_p: float) -> mx.array:
    """One token id, [] i32, of logits [V] f32 (-inf where forbidden, one finite at least).

    temperature <= 0 or top_p = 0: the argmax, lowest id on ties. Else divide by the temperature, keep the top_k
    (0: all), softmax, drop p < min_p * max p, keep the smallest set of best tokens with sum >= top_p (one at least),
    renormalise, and invert the cumulative sum at `uniform` in [0, 1). Best first, and of equal logits the lower id.
    Below 2^-40 of the best a token counts as impossible.
    """
    if temperature <= 0 or top_p <= 0:
        return mx.argmax(logits).astype(mx.int32)
    temperature = min(max(temperature, COLDEST), HOTTEST)
    return pick(reference, metal=metal)(logits, uniform, temperature, top_k, min_p, top_p)


def reference(logits, uniform, temperature, top_k, min_p, top_p):
    order = mx.argsort(ranks(logits))
    if top_k > 0:
        order = order[:top_k]
    x = logits[order]
    gap = mx.where(x == x[0], 0, x - x[0])      # best first; before the division, so that it overflows to -inf only
    p = mx.exp(gap / temperature)               # of the best token's probability
    total = mx.cumsum(mx.where(p > 0, p * ONE, 0).astype(mx.int64))
    kept = mx.where(p >= min_p, total, 0).max()
    if top_p < 1:
        enough = mx.maximum((total[-1].astype(mx.float32) * top_p).astype(mx.int64), 1)
        kept = mx.minimum(kept, total[(total < enough).sum()])
    # Rounding may leave uniform * kept at kept itself: the last token with weight, never one without.
    target = mx.minimum((kept.astype(mx.float32) * uniform).astype(mx.int64), kept - 1)
    return order[(total <= target).sum()].astype(mx.int32)


def metal(logits, uniform, temperature, top_k, min_p, top_p):
    V = logits.size
    threads = min(THREADS, -(-V // 32) * 32)
    names = ("logits", "top_k", "uniform", "temperature", "min_p", "top_p")
    (token,) = kernel("sample", "choose", names, ("token",))(
        [logits, top_k, *map(float, (uniform, temperature, min_p, top_p))], [((), mx.int32)], (1, 1, 1),
        (threads, 1, 1), [("V", V), ("BITS", (V - 1).bit_length())])
    return token
