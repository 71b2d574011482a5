"""The products of native.cpp, in vectors and in plain C++, and NumPy's in their place, against float64."""
import shutil
import subprocess
import sys
import sysconfig

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.ops import native

KINDS = ["IQ2_XXS", "Q2_K", "Q4_K", "Q8_0", "MXFP4", "F16", "BF16", "F32"]
# Sums of K float32 products round K times at most, at random; the largest of thousands of results stays below
# sqrt(K) 2^-24 times a few, relative to the largest result. 2e-6 is that for K = 1024.
TOLERANCE = 2e-6
GATED = 1e-5  # SwiGLU multiplies two of them, whose own largest values its limit hides


@pytest.fixture(params=["vectors", "plain C++", "NumPy"])
def way(request, monkeypatch):
    """Keyword arguments that choose a way to compute; the last one is what runs where nothing was built."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "functions", lambda: None)
    elif not native.built():
        pytest.skip("native.cpp is not built")
    return {"simd": request.param == "vectors"}


def assert_near(found, expected, tolerance=TOLERANCE):
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def product(x, raw, kind):
    return x.astype(np.float64) @ dequantize(raw, kind).astype(np.float64).T


def at_odd_address(raw):
    """The same bytes where a GGUF file may put them: rows and tensors begin at any even address."""
    room = np.empty(raw.size + 2, np.uint8)[2:]
    room[:] = raw.reshape(-1)
    return room.reshape(raw.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 33, 130])  # by decoding for each product, then by slabs
def test_a_product_is_that_of_the_decoded_weights(kind, tokens, way, random_blocks, rng):
    raw, x = at_odd_address(random_blocks(kind, 67, 768)), rng.normal(size=(tokens, 768)).astype(np.float32)
    assert_near(native.matmul(x, raw, kind, **way), product(x, raw, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 130])
def test_every_weight_of_every_row_is_decoded_exactly(kind, tokens, way, random_blocks):
    """Unit vectors pick weights out: no sum rounds, and a wrong bit anywhere shows."""
    raw = random_blocks(kind, 3, 256)
    weights = dequantize(raw, kind)
    for first in range(0, 256, tokens):
        x = np.eye(256, dtype=np.float32)[first:first + tokens]
        assert np.array_equal(native.matmul(x, raw, kind, **way), weights.T[first:first + tokens])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, blocks", [(1, 1), (2, 3), (5, 1), (64, 2), (129, 1)])
@pytest.mark.parametrize("tokens", [2, 9])
def test_any_number_of_rows_and_blocks(kind, rows, blocks, tokens, way, random_blocks, rng):
    width = blocks * max(BLOCK_TYPES[kind].weights, 32)
    raw, x = random_blocks(kind, rows, width), rng.normal(size=(tokens, width)).astype(np.float32)
    assert_near(native.matmul(x, raw, kind, **way), product(x, raw, kind))


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_rows_that_are_no_whole_groups(kind, way, random_blocks, rng):
    raw, x = random_blocks(kind, 5, 45), rng.normal(size=(3, 45)).astype(np.float32)
    assert_near(native.matmul(x, raw, kind, **way), product(x, raw, kind))


@pytest.mark.parametrize("kind, scales", [("Q8_0", [0]), ("Q2_K", [80, 82]), ("Q4_K", [0, 2]), ("IQ2_XXS", [0])])
@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0 ** -24, 6e-5, -65504.0])  # least subnormal, one above, largest
@pytest.mark.parametrize("tokens", [1, 9])
def test_extreme_scales(kind, scales, scale, tokens, way, random_blocks, rng):
    raw, x = random_blocks(kind, 4, 256), rng.normal(size=(tokens, 256)).astype(np.float32)
    blocks = raw.reshape(-1, BLOCK_TYPES[kind].bytes)
    for at in scales:
        blocks[:, at:at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    assert_near(native.matmul(x, raw, kind, **way), product(x, raw, kind))


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_damaged_scale_shows_in_the_result(scale, way):
    raw = np.ones((2, 34), np.uint8)
    raw[1, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    y = native.matmul(np.ones((1, 32), np.float32), raw, "Q8_0", **way)
    assert np.isfinite(y[0, 0]) and np.array_equal(y[0, 1], np.float32(scale), equal_nan=True)


@pytest.mark.parametrize("exponent", [0, 1, 2, 254])
@pytest.mark.parametrize("tokens", [1, 9])
def test_extreme_exponents(exponent, tokens, way, random_blocks, rng):
    raw = random_blocks("MXFP4", 4, 64)
    raw.reshape(-1, 17)[:, 0] = exponent
    raw.reshape(-1, 17)[:, 1:] &= 0x33 if exponent == 254 else 0xFF  # values to 1.5: more would pass float32 on its own
    x = (rng.normal(size=(tokens, 64)) * (2.0 ** -10 if exponent == 254 else 2.0 ** 20)).astype(np.float32)
    assert_near(native.matmul(x, raw, "MXFP4", **way), product(x, raw, "MXFP4"))


def test_groups_take_their_own_rows_and_inputs(way, random_blocks, rng):
    raw, x = random_blocks("Q8_0", 3 * 70, 64), rng.normal(size=(5, 3, 64)).astype(np.float32)
    expected = np.concatenate([product(x[:, g], raw[70 * g:70 * (g + 1)], "Q8_0") for g in range(3)], axis=1)
    assert_near(native.matmul(x, raw, "Q8_0", 3, **way), expected)


@pytest.mark.parametrize("k", [1, 45, 64])
@pytest.mark.parametrize("each", [False, True])
def test_a_product_of_two_arrays(k, each, way, rng):
    a = rng.normal(size=(5, 3, k)).astype(np.float32)
    b = rng.normal(size=(5, 7, k) if each else (7, k)).astype(np.float32)
    found = native.product(mx.array(a), mx.array(b).swapaxes(-1, -2))
    assert_near(np.array(found), a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2))


E, D, F, LIMIT = 5, 512, 256, 1.5


def swiglu(g, u):
    return np.minimum(g, LIMIT) / (1 + np.exp(-np.minimum(g, LIMIT))) * np.clip(u, -LIMIT, LIMIT)


def chosen(rng, tokens, slots):
    """Experts with repetition, across tokens and within one."""
    return rng.integers(0, E, (tokens, slots)).astype(np.int32)


@pytest.mark.parametrize("kind, other", [("IQ2_XXS", "Q8_0"), ("Q4_K", "Q4_K"), ("MXFP4", "F16")])
@pytest.mark.parametrize("tokens", [1, 2, 33, 130])
def test_gate_and_up_of_the_chosen_experts_and_the_shared_one(kind, other, tokens, way, random_blocks, rng):
    (gate, up), shared = (random_blocks(kind, E, F, D) for _ in "gu"), [random_blocks(other, F, D) for _ in "gu"]
    x = rng.normal(0, 0.02, (tokens, D)).astype(np.float32)
    selected, weight = chosen(rng, tokens, 3), rng.random((tokens, 3)).astype(np.float32)
    expected = np.empty((tokens, 4, F))
    for t, s in np.ndindex(tokens, 3):
        g, u = (product(x[t], w[selected[t, s]], kind) for w in (gate, up))
        expected[t, s] = weight[t, s] * swiglu(g, u)
    expected[:, 3] = swiglu(*(product(x, w, other) for w in shared))
    found = native.gate_up(x, selected, weight, gate, kind, up, kind, LIMIT, (*shared, other), **way)
    assert_near(found, expected, GATED)
    assert np.array_equal(found[:, :3], native.gate_up(x, selected, weight, gate, kind, up, kind, LIMIT, **way))


@pytest.mark.parametrize("kind, other", [("Q2_K", "Q8_0"), ("Q4_K", "Q4_K"), ("MXFP4", "F16")])
@pytest.mark.parametrize("tokens", [1, 2, 33, 130])
def test_down_adds_up_the_chosen_experts_and_the_shared_one(kind, other, tokens, way, random_blocks, rng):
    down, shared, selected = random_blocks(kind, E, D, F), random_blocks(other, D, F), chosen(rng, tokens, 3)
    mid = rng.normal(size=(tokens, 4, F)).astype(np.float32)
    routed = np.stack([sum(product(mid[t, s], down[selected[t, s]], kind) for s in range(3)) for t in range(tokens)])
    assert_near(native.down(mid[:, :3], selected, down, kind, **way), routed)
    whole = routed + product(mid[:, 3], shared, other)
    assert_near(native.down(mid, selected, down, kind, (shared, other), **way), whole)


def test_gates_far_below_zero_give_nothing(way, random_blocks):
    gate = np.full((1, 1, 32), -1, np.float16).view(np.uint8)
    mid = native.gate_up(np.full((1, 32), 1e4, np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32),
                         gate, "F16", gate, "F16", LIMIT, **way)
    assert mid.item() == 0


@pytest.mark.parametrize("expert", [-1, E])
def test_an_expert_that_does_not_exist_is_refused(expert, way, random_blocks):
    with pytest.raises(ValueError, match=f"{expert}.* of {E}"):
        native.down(np.zeros((1, 1, F), np.float32), np.array([[expert]], np.int32), random_blocks("Q8_0", E, 32, F),
                    "Q8_0", **way)


def test_no_tokens_give_no_results(way, random_blocks):
    assert native.matmul(np.zeros((0, 64), np.float32), random_blocks("Q8_0", 9, 64), "Q8_0", **way).shape == (0, 9)
    none = np.zeros((0, 3), np.int32)
    down = random_blocks("Q8_0", E, D, F)
    assert native.down(np.zeros((0, 3, F), np.float32), none, down, "Q8_0", **way).shape == (0, D)


@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_the_number_of_threads_changes_no_bit(tokens, random_blocks, rng):
    if not native.built():
        pytest.skip("native.cpp is not built")
    down, selected = random_blocks("Q2_K", E, D, F), chosen(rng, tokens, 3)
    mid = rng.normal(size=(tokens, 3, F)).astype(np.float32)
    one = native.down(mid, selected, down, "Q2_K", threads=1)
    for threads in (2, 3, 16):
        assert np.array_equal(one, native.down(mid, selected, down, "Q2_K", threads=threads))
    flat, w = mid[:, 0], random_blocks("Q4_K", 1000, F)
    assert np.array_equal(native.matmul(flat, w, "Q4_K", threads=1), native.matmul(flat, w, "Q4_K", threads=5))


def test_a_forked_process_computes_too():
    """Threads do not survive a fork."""
    code = ("import os, numpy as np\nfrom ds4mlx.ops import native\n"
            "x, w = np.ones((64, 512), np.float32), np.ones((512, 512), np.float32).view(np.uint8)\n"
            "y = native.matmul(x, w, 'F32', threads=2)\n"
            "if os.fork() == 0:\n    os._exit(0 if (native.matmul(x, w, 'F32', threads=2) == y).all() else 1)\n"
            "print(os.wait()[1])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "0", result.stderr


def test_calls_from_many_threads_take_turns(random_blocks, rng):
    from concurrent.futures import ThreadPoolExecutor
    raw, x = random_blocks("Q8_0", 600, 512), rng.normal(size=(4, 512)).astype(np.float32)
    expected = native.matmul(x, raw, "Q8_0")
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(y, expected) for y in pool.map(lambda _: native.matmul(x, raw, "Q8_0"), range(64)))


def test_an_installation_with_a_compiler_has_built_it():
    if not shutil.which((sysconfig.get_config_var("CXX") or "c++").split()[0]):
        pytest.skip("no compiler here")
    assert native.built() and "native.cpp with" in native.describe(), "install the package again: pip install -e ."


def test_a_report_says_when_it_is_not_built(monkeypatch):
    monkeypatch.setattr(native, "functions", lambda: None)
    assert not native.built() and "not built" in native.describe()
