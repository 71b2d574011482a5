"""Pooling of a compressor: a softmax over the tokens of a group, channel by channel."""
import mlx.core as mx

from ds4mlx.ops.dispatch import pick


def compress(k: mx.array, s: mx.array) -> mx.array:
    """pooled[g, j] = sum_p softmax_p(s[g, p, j]) k[g, p, j].

    k, s [G groups, P slots, W] f32; a slot with score -inf is left out, no channel may have only such slots.
    Returns [G, W] f32.
    """
    return pick(reference)(k, s)


def reference(k, s):
    return (mx.softmax(s, axis=1, precise=True) * k).sum(axis=1)
