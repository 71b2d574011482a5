"""Products on a card at the shapes of Flash's q2 recipe: bytes and operations a second beside the card's own ceilings.

    python tests/bench/cuda_ops.py [tokens ...]

Weights are random and several times the second cache. Decode (up to 16 tokens) is timed as replays of a graph that runs
each product over them in turn; what a layer's products cost together is the last line.
"""
import sys
from collections.abc import Callable
from dataclasses import dataclass

import cupy as cp
import numpy as np

from ds4mlx.cuda_port import ops
from ds4mlx.cuda_port.device import use_stream
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import row_bytes

D, F, EXPERTS, SLOTS = 4096, 2048, 256, 6
LAYERS = 4       # different weights: 7 GB
REPEATS = 20     # of a product in one graph
MATRICES = {     # name: type, rows, columns, groups
    "q_a": ("Q8_0", 1024, D, 1), "kv": ("Q8_0", 512, D, 1), "compressor": ("F16", 2048, D, 1),
    "index_compressor": ("F16", 512, D, 1), "index_weights": ("F16", 64, D, 1), "q_b": ("Q8_0", 32768, 1024, 1),
    "index_q": ("F16", 8192, 1024, 1), "o_a": ("Q8_0", 8192, D, 8), "o_b": ("Q8_0", D, 8192, 1),
    "router": ("F16", 256, D, 1),
}
LAUNCHES = {     # what shares an input
    "attention in": ("q_a", "kv", "compressor", "index_compressor", "index_weights"), "queries": ("q_b", "index_q"),
    "output a": ("o_a",), "output b": ("o_b",), "router": ("router",),
}
SCALES = {"Q8_0": (34, (1,)), "Q2_K": (84, (81, 83)), "IQ2_XXS": (66, (1,))}  # high bytes of half-precision scales


@dataclass(frozen=True, slots=True)
class Product:
    name: str
    run: Callable[[int], None]  # with the weights of a layer
    bytes: int                  # of weights
    operations: int


def random_weight(kind: str, *shape: int) -> Weight:
    if kind == "F16":
        values = cp.random.standard_normal(shape, cp.float32) * 0.02
        return Weight(kind, values.astype(cp.float16).view(cp.uint8), shape)
    size = int(np.prod(shape[:-1])) * row_bytes(kind, shape[-1])
    raw = cp.random.randint(0, 1 << 32, -(-size // 4), dtype=cp.uint32).view(cp.uint8)[:size].copy()
    block, high = SCALES[kind]
    for byte in high:
        raw.reshape(-1, block)[:, byte] = 8 + raw.reshape(-1, block)[:, byte] % 8
    return ops.arranged(Weight(kind, raw.reshape(*shape[:-1], -1), shape))


def seconds(body: Callable[[], None], captured: bool) -> float:
    """Median of five runs, by the card's clock."""
    stream = cp.cuda.get_current_stream()
    body()
    if captured:
        stream.begin_capture()
        body()
        body = stream.end_capture().launch
        body()
    times = []
    for _ in range(5):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) * 1e-3)
    return float(np.median(times))


def ceilings() -> tuple[float, float]:
    """Bytes a second of a copy, read and written; operations a second of a product of halves."""
    a, m = cp.zeros(1 << 30, cp.uint8), cp.random.standard_normal((8192, 8192), cp.float32).astype(cp.float16)
    b = cp.empty_like(a)
    copy = seconds(lambda: b.data.copy_from_device_async(a.data, a.nbytes, cp.cuda.get_current_stream()), False)
    return 2 * a.nbytes / copy, 2 * 8192**3 / seconds(lambda: m @ m, False)


def dense_products(tokens: int) -> list[Product]:
    layers = [{name: random_weight(*shape[:3]) for name, shape in MATRICES.items()} for _ in range(LAYERS)]
    found = []
    for launch, names in LAUNCHES.items():
        k, groups = MATRICES[names[0]][2:]
        x = cp.random.standard_normal((tokens, k * groups), cp.float32)
        out = [cp.empty((tokens, MATRICES[name][1]), cp.float32) for name in names]

        def run(layer, names=names, x=x, out=out, groups=groups):
            ops.dense(x, [layers[layer][name] for name in names], out, groups=groups)
        weights = [layers[0][name] for name in names]
        found.append(Product(launch, run, sum(w.raw.nbytes for w in weights),
                             2 * tokens * sum(int(np.prod(w.shape)) for w in weights)))
    return found


def expert_product(tokens: int) -> Product:
    shapes = (("IQ2_XXS", EXPERTS, F, D), ("IQ2_XXS", EXPERTS, F, D), ("Q2_K", EXPERTS, D, F), ("Q8_0", F, D),
              ("Q8_0", F, D), ("Q8_0", D, F))
    layers = [[random_weight(*shape) for shape in shapes] for _ in range(LAYERS)]
    rng = np.random.default_rng(1)
    chosen = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(tokens)]).astype(np.int32)
    x, y = cp.random.standard_normal((tokens, D), cp.float32), cp.empty((tokens, D), cp.float32)
    selected, weight = cp.asarray(chosen), cp.full((tokens, SLOTS), 0.25, cp.float32)

    def run(layer):
        w1, w3, w2, *shared = layers[layer]
        ops.experts(x, selected, weight, w1, w3, w2, tuple(shared), 10.0, y)
    stacks, shared = layers[0][:3], layers[0][3:]
    return Product("experts", run, sum(w.raw.nbytes for w in shared)
                   + sum(w.raw.nbytes for w in stacks) * len(np.unique(chosen)) // EXPERTS,
                   2 * tokens * (SLOTS + 1) * 3 * D * F)


def main(tokens: list[int]) -> None:
    use_stream()
    copy, product = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, product of halves {product / 1e12:.0f} TFLOP/s")
    for t in tokens:
        total = 0.0
        for item in [*dense_products(t), expert_product(t)]:
            spent = seconds(lambda run=item.run: [run(i % LAYERS) for i in range(REPEATS)], t <= 16) / REPEATS
            total += spent
            print(f"{t:5} tokens  {item.name:14} {item.bytes / 1e6:7.1f} MB {spent * 1e6:8.1f} us "
                  f"{item.bytes / spent / 1e12:5.2f} TB/s ({item.bytes / spent / copy:4.0%}) "
                  f"{item.operations / spent / 1e12:6.1f} TFLOP/s ({item.operations / spent / product:4.0%})")
        print(f"{t:5} tokens  a layer {total * 1e6:.0f} us")


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [1, 16, 2048])
