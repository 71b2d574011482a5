"""Products on the card at the shapes of Flash's q2 recipe: bytes and operations a second, beside the card's own
ceilings; and how long a step's tokens take to draw."""
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port import ops
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.device import use_stream
from ds4mlx.cuda_port.forms import can_be_tiled
from ds4mlx.cuda_port.launch import limits
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import row_bytes

D, F, EXPERTS, SLOTS, LIMIT = 4096, 2048, 256, 6, 10.0
LAYERS = 4       # different weights: 7 GB, many times a cache
REPEATS = 20     # of a product in one graph
FEW = 16         # tokens of a decode step
RUNS = 5
MATRICES = {     # name: type, rows, columns
    "q_a": ("Q8_0", 1024, D), "kv": ("Q8_0", 512, D), "compressor": ("F16", 2048, D),
    "index_compressor": ("F16", 512, D), "index_weights": ("F16", 64, D), "q_b": ("Q8_0", 32768, 1024),
    "index_q": ("F16", 8192, 1024), "o_a": ("Q8_0", 8192, D), "o_b": ("Q8_0", D, 8192), "router": ("F16", 256, D),
}
LAUNCHES = {     # what shares an input, and its groups of columns
    "attention-in": (("q_a", "kv", "compressor", "index_compressor", "index_weights"), 1),
    "queries": (("q_b", "index_q"), 1), "output-a": (("o_a",), 8), "output-b": (("o_b",), 1),
    "router": (("router",), 1),
}
STACKS = ("IQ2_XXS", (EXPERTS, F, D)), ("IQ2_XXS", (EXPERTS, F, D)), ("Q2_K", (EXPERTS, D, F))
SHARED = ("Q8_0", (F, D)), ("Q8_0", (F, D)), ("Q8_0", (D, F))
VOCABULARY = 129280
DRAWS = {        # name: deviation of the logits, and temperature, min_p, top_p
    "greedy": (4, 0, 0, 1), "temperature 1": (4, 1, 0, 1), "min_p 0.05": (4, 1, 0.05, 1), "top_p 0.9": (4, 1, 0, 0.9),
    "top_p 0.9, flat": (1, 1, 0, 0.9),
}
SCALES = {"Q8_0": (34, (1,)), "Q2_K": (84, (81, 83)), "IQ2_XXS": (66, (1,))}  # high bytes of half-precision scales


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one launch, or of the experts' few: bytes of weights or logits read, operations, seconds."""
    name: str
    tokens: int
    bytes: int
    operations: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card does at best: bytes a second of a copy, read and written; operations a second on halves."""
    copy: float
    product: float


def ceilings() -> Ceilings:
    use_stream()
    a, m = cp.zeros(1 << 30, cp.uint8), cp.random.standard_normal((8192, 8192), cp.float32).astype(cp.float16)
    b = cp.empty_like(a)
    copied = _seconds(lambda: b.data.copy_from_device_async(a.data, a.nbytes, cp.cuda.get_current_stream()), False)
    return Ceilings(2 * a.nbytes / copied, 2 * 8192**3 / _seconds(lambda: m @ m, False))


def measured(name: str, tokens: int) -> Iterator[Speed]:
    """Of the launch of that name, or of "all". Weights are random. Up to FEW tokens are timed as replays of a graph
    that runs the product over different layers' weights in turn."""
    use_stream()
    for launch in LAUNCHES:
        if name in (launch, "all"):
            yield _dense(launch, tokens)
    if name in ("experts", "all"):
        yield _experts(tokens)


def drawn(rows: int) -> Iterator[Speed]:
    """A token of each of so many rows of logits, by each of DRAWS."""
    use_stream()
    token, report = cp.empty(rows, cp.int32), cp.empty((rows, 2), cp.float32)
    top_k, normal = cp.zeros(rows, cp.int32), cp.random.standard_normal((rows, VOCABULARY), cp.float32)
    for name, (deviation, *how) in DRAWS.items():
        logits = deviation * normal
        settings = cp.asarray(np.tile(np.array([0.5, *how], np.float32), (rows, 1)))    # 0.5: the random number
        spent = _seconds(lambda: [ops.sample(logits, logits, settings, top_k, token, report) for _ in range(REPEATS)],
                         True)
        yield Speed(name, rows, logits.nbytes, 0, spent / REPEATS)


def _dense(launch: str, tokens: int) -> Speed:
    names, groups = LAUNCHES[launch]
    layers = [[_random_weight(kind, rows, k) for kind, rows, k in map(MATRICES.get, names)] for _ in range(LAYERS)]
    x = cp.random.standard_normal((tokens, MATRICES[names[0]][2] * groups), cp.float32)
    out = [cp.empty((tokens, w.shape[0]), cp.float32) for w in layers[0]]
    spent = _a_layer(lambda i: ops.dense(x, layers[i], out, groups=groups), tokens)
    return Speed(launch, tokens, sum(w.raw.nbytes for w in layers[0]),
                 2 * tokens * sum(int(np.prod(w.shape)) for w in layers[0]), spent)


def _experts(tokens: int) -> Speed:
    tiled = can_be_tiled(*STACKS, limits())
    layers = [([_random_weight(kind, *shape, tiled=tiled) for kind, shape in STACKS],
               tuple(_random_weight(kind, *shape) for kind, shape in SHARED)) for _ in range(LAYERS)]
    rng = np.random.default_rng(1)
    chosen = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(tokens)]).astype(np.int32)
    x, y = cp.random.standard_normal((tokens, D), cp.float32), cp.empty((tokens, D), cp.float32)
    selected, weight = cp.asarray(chosen), cp.full((tokens, SLOTS), 0.25, cp.float32)

    def run(i: int) -> None:
        stacks, shared = layers[i]
        ops.experts(x, selected, weight, *stacks, shared, LIMIT, y)
    stacks, shared = layers[0]
    read = sum(w.raw.nbytes for w in stacks) * len(np.unique(chosen)) // EXPERTS + sum(w.raw.nbytes for w in shared)
    return Speed("experts", tokens, read, 2 * tokens * (SLOTS + 1) * 3 * D * F, _a_layer(run, tokens))


def _random_weight(kind: str, *shape: int, tiled: bool = False) -> Weight:
    if kind == "F16":
        values = cp.random.standard_normal(shape, cp.float32) * 0.02
        return Weight(kind, values.astype(cp.float16).view(cp.uint8), shape)
    size = int(np.prod(shape[:-1])) * row_bytes(kind, shape[-1])
    raw = cp.random.randint(0, 1 << 32, -(-size // 4), dtype=cp.uint32).view(cp.uint8)[:size].copy()
    block, high = SCALES[kind]
    for byte in high:
        raw.reshape(-1, block)[:, byte] = 8 + raw.reshape(-1, block)[:, byte] % 8
    return ops.arranged(Weight(kind, raw.reshape(*shape[:-1], -1), shape), tiled)


def _a_layer(run: Callable[[int], None], tokens: int) -> float:
    return _seconds(lambda: [run(i % LAYERS) for i in range(REPEATS)], tokens <= FEW) / REPEATS


def _seconds(body: Callable[[], object], captured: bool) -> float:
    """Median of RUNS, by the card's clock."""
    stream = cp.cuda.get_current_stream()
    body()
    if captured:
        stream.begin_capture()
        body()
        body = stream.end_capture().launch
        body()
    times = []
    for _ in range(RUNS):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) * 1e-3)
    return float(np.median(times))
