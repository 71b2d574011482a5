"""Products on the card against NumPy in float64, at the widths of Flash. Errors are of the root mean square."""
import cupy as cp
import numpy as np
import pytest

from ds4mlx.cuda_port import ops
from ds4mlx.cuda_port.device import use_stream
from ds4mlx.cuda_port.forms import can_be_tiled
from ds4mlx.cuda_port.launch import limits
from ds4mlx.cuda_port.ops.dense_matmul import dense_encoding
from ds4mlx.cuda_port.ops.dequantize import dequantize
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.blocks import row_bytes
from ds4mlx.gguf.dequant import dequantize as dequantized

HALVES = {"Q8_0": (34, (1,)), "Q2_K": (84, (81, 83)), "Q4_K": (144, (1, 3)), "IQ2_XXS": (66, (1,))}  # high bytes
PLANES = 1e-4   # 16 bits for the largest of 256 normal activations: 3e-5 a product, three in a row
EIGHTS = 1.5e-3  # activations and weights in halves, 3e-4 a product
EXACT = 2e-6    # float32 sums


@pytest.fixture(autouse=True)
def on_stream():
    stream = use_stream()
    yield
    stream.synchronize()


@pytest.fixture
def weight(rng):
    """weight(kind, *shape): random blocks on the card as in a file, and their values in float64."""
    def make(kind, *shape):
        if kind in ("F32", "F16"):
            raw = rng.normal(size=shape).astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
        else:
            raw = rng.integers(0, 256, (*shape[:-1], row_bytes(kind, shape[-1])), np.uint8)
            size, high = HALVES.get(kind, (17, ()))
            blocks = raw.reshape(-1, size)
            blocks[:, high] = 8 + blocks[:, high] % 8
            if kind == "MXFP4":
                blocks[:, 0] = 116 + blocks[:, 0] % 8
        return Weight(kind, cp.asarray(raw), shape), dequantized(raw, kind).reshape(shape)
    return make


def near(found, wanted, bound):
    found = cp.asnumpy(found).astype(np.float64)
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted ** 2))
    assert np.isfinite(found).all() and error < bound, error


def normal(rng, *shape):
    x = rng.standard_normal(shape).astype(np.float32)
    return cp.asarray(x), x.astype(np.float64)


def unwritten(*shape):
    return cp.full(shape, cp.nan, cp.float32)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
def test_cuda_several_matrices_of_two_types_in_one_launch(tokens, weight, rng):
    made = [weight(kind, rows, 4096) for kind, rows in (("Q8_0", 48), ("F16", 64), ("Q8_0", 512), ("F16", 16))]
    x, exact = normal(rng, tokens, 4096)
    out = [unwritten(tokens, len(values)) for _, values in made]
    ops.dense(x, [ops.arranged(w) for w, _ in made], out)
    for y, (_, values) in zip(out, made, strict=True):
        near(y, exact @ values.T, PLANES)


@pytest.mark.parametrize("width", [256, 768, 1024, 8192])
@pytest.mark.parametrize("tokens", [1, 16])
def test_cuda_dense_of_any_width(width, tokens, weight, rng):
    w, values = weight("Q8_0", 64, width)
    x, exact = normal(rng, tokens, width)
    ops.dense(x, [ops.arranged(w)], [y := unwritten(tokens, 64)])
    near(y, exact @ values.T, PLANES)


@pytest.mark.parametrize("tokens", [5, 13])
def test_cuda_dense_keeps_what_it_encoded_of_its_tokens_alone(tokens, weight, rng):
    w, values = weight("Q8_0", 256, 4096)
    x, exact = normal(rng, tokens, 4096)
    planes, scales, y = cp.full((16, 2, 4096), 77, cp.uint8), unwritten(16, 16), unwritten(tokens, 256)
    if not dense_encoding(x, [ops.arranged(w)], [y], planes, scales):
        pytest.skip("this card has no room for the kernel that keeps them")
    codes = cp.asnumpy(planes[:tokens]).view(np.int8).astype(np.float64)
    near((256 * codes[:, 0] + codes[:, 1]) * np.repeat(cp.asnumpy(scales[:tokens]), 256, axis=1), exact, PLANES)
    near(y, exact @ values.T, PLANES)
    assert bool((planes[tokens:] == 77).all()) and bool(cp.isnan(scales[tokens:]).all())


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_cuda_groups_have_inputs_of_their_own(tokens, weight, rng):
    w, values = weight("Q8_0", 4 * 32, 512)
    x, exact = normal(rng, tokens, 4 * 512)
    ops.dense(x, [ops.arranged(w)], [y := unwritten(tokens, 4 * 32)], groups=4)
    near(y, np.einsum("tgk,gnk->tgn", exact.reshape(tokens, 4, 512), values.reshape(4, 32, 512)).reshape(tokens, -1),
         EIGHTS)


@pytest.mark.parametrize("quality, bound", [(False, EIGHTS), (True, EXACT)])
def test_cuda_dense_of_many_tokens(quality, bound, weight, rng):
    made = [weight(kind, rows, 1024) for kind, rows in (("Q8_0", 100), ("F16", 24), ("F32", 5))]
    x, exact = normal(rng, 70, 1024)
    out = [unwritten(70, len(values)) for _, values in made]
    ops.dense(x, [ops.arranged(w) for w, _ in made], out, quality=quality)
    for y, (_, values) in zip(out, made, strict=True):
        near(y, exact @ values.T, bound)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"])
def test_cuda_dense_reads_every_type_as_files_have_it(kind, weight, rng):
    w, values = weight(kind, 40, 512)
    x, exact = normal(rng, 3, 512)
    ops.dense(x, [w], [y := unwritten(3, 40)])
    near(y, exact @ values.T, PLANES if kind == "F16" else EXACT)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"])
def test_cuda_dequantize_is_exact(kind, weight):
    w, values = weight(kind, 24, 512)
    dequantize(ops.arranged(w), 8, out := unwritten(16, 512))
    np.testing.assert_array_equal(cp.asnumpy(out), values[8:])


def swiglu(gate, up, limit):
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit)


class Layer:
    """The experts of a layer: gate, up, down, and the shared ones, as weights and as values."""

    def __init__(self, weight, gate, down, experts, D, F, shared="Q8_0"):
        shapes = [(gate, experts, F, D), (gate, experts, F, D), (down, experts, D, F), (shared, F, D), (shared, F, D),
                  (shared, D, F)]
        weights, self.values = zip(*(weight(*shape) for shape in shapes), strict=True)
        tiled = can_be_tiled(*((w.kind, w.shape) for w in weights[:3]), limits())
        self.weights = [ops.arranged(w, tiled and i < 3) for i, w in enumerate(weights)]

    def run(self, x, selected, weight, quality=False):
        w1, w3, w2, *shared = self.weights
        ops.experts(x, cp.asarray(selected), weight, w1, w3, w2, tuple(shared), 1.5, y := unwritten(*x.shape),
                    quality=quality)
        return y

    def wanted(self, x, selected, weight):
        gate, up, down, shared_gate, shared_up, shared_down = self.values
        y = swiglu(x @ shared_gate.T, x @ shared_up.T, 1.5) @ shared_down.T
        for e in range(len(gate)):
            t, s = np.nonzero(selected == e)
            mid = swiglu(x[t] @ gate[e].T, x[t] @ up[e].T, 1.5) * weight[t, s][:, None]
            np.add.at(y, t, mid @ down[e].T)
        return y


def choice(rng, tokens, slots, experts):
    return np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(np.int32)


@pytest.mark.parametrize("gate, down", [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("MXFP4", "MXFP4"), ("Q2_K", "IQ2_XXS")])
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_cuda_experts(gate, down, tokens, weight, rng):
    layer, selected = Layer(weight, gate, down, 7, 2048, 2048), choice(rng, tokens, 6, 7)
    (x, exact), (by, exact_by) = normal(rng, tokens, 2048), normal(rng, tokens, 6)
    assert layer.weights[0].arranged and layer.weights[2].arranged
    near(layer.run(x, selected, by), layer.wanted(exact, selected, exact_by), PLANES if tokens < 32 else EIGHTS)


def test_cuda_experts_of_many_tokens_are_as_exact_as_of_few_with_quality(weight, rng):
    layer, selected = Layer(weight, "IQ2_XXS", "Q2_K", 5, 2048, 2048), choice(rng, 37, 3, 5)
    (x, exact), (by, exact_by) = normal(rng, 37, 2048), normal(rng, 37, 3)
    near(layer.run(x, selected, by, quality=True), layer.wanted(exact, selected, exact_by), PLANES)


@pytest.mark.parametrize("tokens", [130, 400])
def test_cuda_an_expert_that_all_tokens_choose_fills_many_tiles(tokens, weight, rng):
    layer, selected = Layer(weight, "IQ2_XXS", "Q2_K", 9, 2048, 2048), choice(rng, tokens, 3, 9)
    selected[:, 0], selected[:, 1:] = 8, selected[:, 1:] % 8  # one of them in every row, and perhaps one twice
    (x, exact), (by, exact_by) = normal(rng, tokens, 2048), normal(rng, tokens, 3)
    near(layer.run(x, selected, by), layer.wanted(exact, selected, exact_by), EIGHTS)


@pytest.mark.parametrize("gate, down, shared", [("F16", "F32", "F16"), ("IQ2_XXS", "Q2_K", "Q8_0")])
def test_cuda_small_models_have_experts_too(gate, down, shared, weight, rng):
    layer, selected = Layer(weight, gate, down, 4, 256, 256, shared), choice(rng, 5, 3, 4)
    (x, exact), (by, exact_by) = normal(rng, 5, 256), normal(rng, 5, 3)
    near(layer.run(x, selected, by), layer.wanted(exact, selected, exact_by), PLANES)


def test_cuda_the_same_tokens_give_the_same_bits(weight, rng):
    layer, selected = Layer(weight, "IQ2_XXS", "Q2_K", 8, 2048, 2048), choice(rng, 300, 6, 8)
    (x, _), (by, _) = normal(rng, 300, 2048), normal(rng, 300, 6)
    first = cp.asnumpy(layer.run(x, selected, by))
    np.testing.assert_array_equal(cp.asnumpy(layer.run(x, selected, by)), first)
