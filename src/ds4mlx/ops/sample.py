"""The next token from the logits, in one fixed order of steps, driven by one uniform number."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick

COLDEST = 1e-30  # colder changes nothing, and float32 takes far colder for 0: the best token alone is left


def sample(logits: mx.array, uniform: float, temperature: float, top_k: int, min_p: float, top_p: float) -> mx.array:
    """One token id, [] i32, of logits [V] f32 (-inf where forbidden, one finite at least).

    temperature <= 0 or top_p = 0: the argmax, lowest id on ties. Else divide by the temperature, keep the top_k
    (0: all), softmax, drop p < min_p * max p, keep the smallest set of best tokens with sum >= top_p (one at least),
    renormalise, and invert the cumulative sum at `uniform` in [0, 1).
    """
    if temperature <= 0 or top_p <= 0:
        return mx.argmax(logits).astype(mx.int32)
    return pick(reference)(logits, uniform, temperature, top_k, min_p, top_p)


def reference(logits, uniform, temperature, top_k, min_p, top_p):
    order = mx.argsort(-logits)
    if top_k > 0:
        order = order[:top_k]
    gap = logits[order] - logits[order[0]]      # best first; before the division, so that it overflows to -inf only
    p = mx.softmax(gap / max(temperature, COLDEST), precise=True)
    p = mx.where(p >= min_p * p[0], p, 0)
    if top_p < 1:                               # at 1 the sum's rounding would cut 0.1 % of a flat distribution
        before = mx.cumsum(p, inclusive=False)
        p = mx.where((before < top_p) | (mx.arange(p.size) == 0), p, 0)
    total = mx.cumsum(p)
    place = (total <= uniform * total[-1]).sum()
    # Rounding may leave uniform * total at total itself: the last token with weight, never one without.
    return order[mx.minimum(place, (p > 0).sum() - 1)].astype(mx.int32)
