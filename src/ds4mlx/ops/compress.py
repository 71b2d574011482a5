"""A compressor: every `ratio` tokens become one row, pooled channel by channel.

Ratio 128 pools the tokens of a group. Ratio 4 overlaps: k and s are twice as wide as a row, and a row pools the carry
halves ([:w]) of the group before with the own halves ([w:]) of its own group.
"""
import mlx.core as mx

from ds4mlx.cuda_port.source import Defines
from ds4mlx.ops import cuda_kernel, keep_cuda, native_step
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import Template, kernel
from ds4mlx.ops.kv_round import Packing, pack, pack_bytes
from ds4mlx.ops.rope_tail import reference as rope_reference

PARTS_CHANNELS = 2048  # threads of a row times four: 512 threads, whose sums fit threadgroup memory


def compress_step(k: mx.array, s: mx.array, frontier: mx.array, ape: mx.array, norm: mx.array, cos: mx.array,
                  sin: mx.array, start: int, ratio: int, packing: Packing | None,
                  eps: float) -> tuple[mx.array, mx.array | None]:
    """The frontier and the rows after T more tokens: row = pack(rotate(rms(pooled) * norm)), pooled as in `pool`.

    k, s [T, m w], the products of the tokens start … start + T - 1; ape [ratio, m w], added to s by place in the group;
    norm [w]; m = 2 if groups overlap, else 1. frontier [n, 2, m w]: k and s (ape added) of the tokens before that are
    still needed, the open group's and, if groups overlap, those of the group before it. cos, sin [G, R/2] at the first
    positions of the G groups that are completed. All f32.
    Returns the next frontier and [G, row], packed as `kv_round.pack` does, or None when G = 0.
    Raises ValueError when frontier or tables do not fit start, T and ratio.
    """
    T, groups = k.shape[0], (start % ratio + k.shape[0]) // ratio
    overlap = k.shape[1] == 2 * norm.shape[0]
    before = ratio if overlap and start >= ratio else 0     # tokens of the previous group, held for their carry halves
    if frontier.shape != (before + start % ratio, 2, k.shape[1]) or cos.shape[0] != groups or not T:
        raise ValueError(f"compress_step: frontier {frontier.shape} and tables {cos.shape} for k {k.shape} at token "
                         f"{start}, ratio {ratio}: needed {before + start % ratio} tokens and {groups} groups")
    return pick(step_reference, metal=step_metal, cuda=step_cuda)(
        k, s, frontier, ape, norm, cos, sin, start, before, packing, eps)


def compress_token(k: mx.array, s: mx.array, frontiers: mx.array, ape: mx.array, norm: mx.array, cos: mx.array,
                   sin: mx.array, positions: mx.array, ratio: int, packing: Packing | None,
                   eps: float) -> tuple[mx.array, mx.array]:
    """`compress_step` of one token of each of B sequences, whose frontiers are rings.

    k, s [B, m w], positions i32 [B]; ape, norm, packing as there; cos, sin [B, R/2] at the first position of the group
    that each token belongs to. frontiers [B, m ratio, 2, m w]: k and s (ape added) of the token of position p lie at
    p % (m ratio); places of tokens that `compress_step` would not hold may hold anything, then and afterwards.
    Returns the next frontiers and [B, row], zeros where (positions[b] + 1) % ratio: the group is not complete.
    Raises ValueError when the shapes do not fit.
    """
    B, columns = k.shape
    m = columns // norm.shape[0]
    if frontiers.shape != (B, m * ratio, 2, columns) or cos.shape[0] != B or positions.shape != (B,):
        raise ValueError(f"compress_token: frontiers {frontiers.shape}, tables {cos.shape}, positions "
                         f"{positions.shape} for k {k.shape}, needed {(B, m * ratio, 2, columns)} and {B} others")
    run = pick(token_reference, metal=token_metal, cuda=token_cuda, native=token_cpu)
    return run(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps)


def token_cpu(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps):
    form = native_step.Rows(norm.shape[0], 2 * cos.shape[1], packing)
    if not form.fits():
        return token_reference(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps)
    return native_step.compress(k, s, frontiers, ape, norm, cos, sin, positions, form, eps)


def step_cuda(k, s, frontier, ape, norm, cos, sin, start, before, packing, eps):
    (T, columns), ratio, groups, width = k.shape, ape.shape[0], cos.shape[0], norm.shape[0]
    if not keep_cuda.group_fits(width, 2 * cos.shape[1], packing):
        return step_reference(k, s, frontier, ape, norm, cos, sin, start, before, packing, eps)
    n, held, done = frontier.shape[0], columns // width * ratio, before + groups * ratio
    left = n + T - done + (ratio if columns > width and done else 0)
    own = min(left, T)
    places = mx.arange(start + T - own, start + T) % ratio
    after = mx.stack([k[T - own:], s[T - own:] + ape[places]], axis=1)
    if left > own:
        after = mx.concatenate([frontier[n - (left - own):], after])
    if not groups:
        return after, None
    ring = mx.concatenate([frontier, mx.zeros((held - n, 2, columns))])     # as `Pool` reads what was before
    ring = mx.roll(ring, (start - n) % held, axis=0)
    macros, row = _cuda_macros(ape, norm, cos, columns, packing)
    call = ("::rows(k, s, (const u8*)ring, ape, norm, cosine, sine, (u8*)made - (long long)(start[0] / RATIO) * ROW, "
            f"none, start[0], {float(eps)!r}f);")
    names = "k", "s", "ring", "ape", "norm", "cosine", "sine", "start", "none"
    (made,) = cuda_kernel.kernel("compress", call, names, ("made",), macros, width)(
        [k, s, ring, ape, norm, cos, sin, mx.array([start], mx.int32), cuda_kernel.zeros(1)],
        [((groups, row[0]), row[1])], (groups,))
    return after, made


def token_cuda(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps):
    width, R = norm.shape[0], 2 * cos.shape[1]
    if not keep_cuda.group_fits(width, R, packing):
        return token_reference(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps)
    part = keep_cuda.group_part(0, k, s, frontiers, ape, norm, cos, sin, packing)
    _, row = _cuda_macros(ape, norm, cos, frontiers.shape[3], packing)
    return tuple(keep_cuda.launch(positions, [part], keep_cuda.sizes(width, width, R, *row), eps))


def _cuda_macros(ape: mx.array, norm: mx.array, cos: mx.array, columns: int,
                 packing: Packing | None) -> tuple[Defines, tuple[int, mx.Dtype]]:
    """And the width of a row and its type."""
    width, R = norm.shape[0], 2 * cos.shape[1]
    row, dtype = (pack_bytes(width, R, packing), mx.uint8) if packing else (width, mx.float32)
    return (("RATIO", ape.shape[0]), ("M", columns // width), ("W", width), ("R", R),
            ("INDEX", int(packing == "fp4")), ("PACKED", int(packing is not None)), ("PAGE_ROWS", 1 << 30),
            ("ROW", row * dtype.size)), (row, dtype)


def token_reference(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps):
    r, w, places = ape.shape[0], norm.shape[0], frontiers.shape[1]
    token = mx.stack([k, s + ape[positions % r]], axis=1)
    here = mx.arange(places) == (positions % places)[:, None]
    frontiers = mx.where(here[..., None, None], token[:, None], frontiers)
    first = positions - positions % r                                           # of the token's group
    slots = (first[:, None] + mx.arange(r - places, r)) % places                # the group before, then its own
    tokens = mx.take_along_axis(frontiers, slots[..., None, None], axis=1)
    if places > r:
        tokens = mx.concatenate([tokens[:, :r, :, :w], tokens[:, r:, :, w:]], axis=1)
    there = first[:, None] + mx.arange(r - places, r) >= 0
    values, scores = (mx.where(there[..., None], tokens[:, :, i], empty) for i, empty in enumerate((0.0, -mx.inf)))
    row = mx.fast.rms_norm(pool(values, scores), norm, eps)
    row = pack(rope_reference(row, cos, sin), packing, 2 * cos.shape[1])
    complete = (positions + 1) % r == 0
    return frontiers, mx.where(complete[:, None], row, mx.array(0, row.dtype))


def step_reference(k, s, frontier, ape, norm, cos, sin, start, before, packing, eps):
    r, groups = ape.shape[0], cos.shape[0]
    s = s + ape[(start + mx.arange(k.shape[0])) % r]
    tokens = mx.concatenate([frontier, mx.stack([k, s], axis=1)])               # [n + T, 2, m w]
    done = before + groups * r
    overlap = k.shape[1] == 2 * norm.shape[0]
    left = mx.contiguous(tokens[done - (r if overlap and done else 0):])
    if not groups:
        return left, None
    k, s = (_slots(tokens[:done, i], before, r, overlap, empty) for i, empty in enumerate((0.0, -mx.inf)))
    row = mx.fast.rms_norm(pool(k, s), norm, eps)
    return left, pack(rope_reference(row, cos, sin), packing, 2 * cos.shape[1])


def step_metal(k, s, frontier, ape, norm, cos, sin, start, before, packing, eps):
    (T, columns), (ratio, _), groups = k.shape, ape.shape, cos.shape[0]
    w, R = norm.shape[0], 2 * cos.shape[1]
    if not _has_kernel(w, R, packing):
        return step_reference(k, s, frontier, ape, norm, cos, sin, start, before, packing, eps)
    overlap = columns == 2 * w
    done = before + groups * ratio
    left = frontier.shape[0] + T - done + (ratio if overlap and done else 0)
    row, sizes, threads = _sizes(ratio, columns, w, R, packing)
    launch = kernel("compress", "step", ("k", "s", "frontier", "ape", "norm", "cos", "sin", "start", "tokens", "eps"),
                    ("next", "rows"))
    # No buffer is empty, for an empty one has no address; of an output that is only there for that, nothing is kept.
    some = [a if a.size else mx.zeros(8) for a in (frontier, cos, sin)]
    after, rows = launch([k, s, some[0], ape, norm, *some[1:], start, T, eps],
                         [((max(left, 1), 2, columns), mx.float32), ((max(groups, 1), row[0]), row[1])],
                         (groups + -(-left * columns // (4 * threads)), 1, 1), (threads, 1, 1), sizes)
    return after[:left], rows if groups else None


def token_metal(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps):
    (B, columns), ratio, w, R = k.shape, ape.shape[0], norm.shape[0], 2 * cos.shape[1]
    if not _has_kernel(w, R, packing):
        return token_reference(k, s, frontiers, ape, norm, cos, sin, positions, packing, eps)
    row, sizes, threads = _sizes(ratio, columns, w, R, packing)
    launch = kernel("compress", "token", ("k", "s", "frontiers", "ape", "norm", "cos", "sin", "positions", "eps"),
                    ("next", "rows"))
    return tuple(launch([k, s, frontiers, ape, norm, cos, sin, positions, eps],
                        [(frontiers.shape, mx.float32), ((B, row[0]), row[1])],
                        (1 + -(-frontiers.shape[1] * columns // (4 * threads)), B, 1), (threads, 1, 1),
                        [*sizes, ("ROW", row[0])]))


def _has_kernel(w: int, R: int, packing: Packing | None) -> bool:
    """So has every released model."""
    return w % 128 == 0 and w <= 4096 and R % 4 == 0 and (w - R) % 64 == 0 and (packing != "fp4" or w == 128)


def _sizes(ratio: int, columns: int, w: int, R: int, packing: Packing | None) -> tuple[tuple[int, mx.Dtype], Template,
                                                                                       int]:
    """What a row is made of, the sizes that both kernels are compiled for, and threads of a threadgroup."""
    parts = max(1, min(ratio // 8, PARTS_CHANNELS // w))
    row = (pack_bytes(w, R, packing), mx.uint8) if packing else (w, mx.float32)
    return row, [("RATIO", ratio), ("M", columns // w), ("W", w), ("R", R), ("PARTS", parts),
                 ("FP4", packing == "fp4")], w // 4 * parts


def _slots(a: mx.array, before: int, ratio: int, overlap: bool, empty: float) -> mx.array:
    """What groups pool, [groups, m ratio, w], of a [before + groups ratio, m w]; `empty` where no group is before."""
    own = a[before:].reshape(-1, ratio, a.shape[1])
    if not overlap:
        return own
    w = a.shape[1] // 2
    first = a[:ratio, :w] if before else mx.full((ratio, w), empty)
    carry = mx.concatenate([first[None], own[:-1, :, :w]])
    return mx.concatenate([carry, own[..., w:]], axis=1)


def pool(k: mx.array, s: mx.array) -> mx.array:
    """pooled[g, j] = sum_p softmax_p(s[g, p, j]) k[g, p, j].

    k, s [G groups, P slots, W] f32; a slot with score -inf is left out, no channel may have only such slots.
    Returns [G, W] f32.
    """
    return (mx.softmax(s, axis=1, precise=True) * k).sum(axis=1)
