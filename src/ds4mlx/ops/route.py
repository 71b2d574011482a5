"""Which experts a token goes to, and how much each of them counts."""
import mlx.core as mx

from ds4mlx.ops import cuda_kernel
from ds4mlx.ops.dispatch import pick
from ds4mlx.ops.kernel import kernel
from ds4mlx.ops.ranking import ranks


def route(logits: mx.array, bias: mx.array | None, table: mx.array | None, ids: mx.array, k: int,
          scale: float) -> tuple[mx.array, mx.array]:
    """selected = table[ids], or the k best of p + bias; weight = scale p[selected] / sum of p[selected].

    p = sqrt(log(1 + e^logits)), for each token by itself.
    logits [T, E] f32; bias [E] f32, which selects and never weighs, or table [V, k] i32; ids [T] i32, for a table.
    Returns i32 [T, k] and f32 [T, k]. The best are in ascending order; of equal ones the lower id is taken.
    Raises ValueError unless there is exactly one of bias and table, and k experts to choose.
    """
    if (bias is None) == (table is None):
        raise ValueError("route: give either a bias or a table of experts by token id")
    if not 0 < k <= (logits.shape[-1] if table is None else table.shape[-1]):
        raise ValueError(f"route: {k} of {logits.shape[-1] if table is None else table.shape[-1]} experts")
    fits = k <= 32 and logits.shape[-1] <= 1024    # one choice a lane; all scores in the registers of a simdgroup
    kernels = {"metal": metal, "cuda": cuda} if fits else {}
    return pick(reference, **kernels)(logits, bias, table, ids, k, scale)


def probability(logits: mx.array) -> mx.array:
    """sqrt(log(1 + e^logits)), in the form that neither overflows nor loses small values."""
    return mx.sqrt(mx.logaddexp(logits, 0.0))


def reference(logits, bias, table, ids, k, scale):
    p = probability(logits)
    if table is not None:
        selected = table[ids]
    else:
        selected = mx.sort(mx.argpartition(ranks(p + bias), kth=k - 1, axis=-1)[..., :k].astype(mx.int32), axis=-1)
    chosen = mx.take_along_axis(p, selected, axis=-1)
    return selected, chosen / chosen.sum(axis=-1, keepdims=True) * scale


def cuda(logits, bias, table, ids, k, scale):
    T, E = logits.shape
    how = {"bias": bias} if table is None else {"table": table, "ids": ids}
    call = (f"::scored(logits, {'bias, 0, 0' if table is None else '0, table, ids'}, selected, weight, "
            f"{float(scale)!r}f, 0, 0, 0, 0, 0, 0, 0, 0);")     # no hyper-connection to be finished
    selected, weight = cuda_kernel.kernel("route", call, ("logits", *how), ("selected", "weight"),
                                          (("E", E), ("K", k), ("STREAMS", 1), ("HIDDEN", 1)), 32)(
        [logits, *how.values()], [((T, k), mx.int32), ((T, k), mx.float32)], (T,))
    return selected, weight


def metal(logits, bias, table, ids, k, scale):
    T, E = logits.shape
    entry, chooses = ("scored", {"bias": bias}) if table is None else ("hashed", {"table": table, "ids": ids})
    names = ("logits", *chooses, "scale")
    selected, weight = kernel("route", entry, names, ("selected", "weight"))(
        [logits, *chooses.values(), float(scale)], [((T, k), mx.int32), ((T, k), mx.float32)], (T, 1, 1), (32, 1, 1),
        [("E", E), ("K", k)])
    return selected, weight
