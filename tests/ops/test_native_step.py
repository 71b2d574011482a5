"""A step's small operations in native.cpp, in vectors and in plain C++, against the references."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.ops import native, native_step
from ds4mlx.ops.kv_round import fp4_pack, fp8_pack, fp8_unpack

EPS = 1e-6
NEAR = 1e-5     # float32 sums in another order, of numbers of about unit size


@pytest.fixture(params=["vectors", "plain C++", "16 threads"], autouse=True)
def way(request, monkeypatch):
    if not native.built():
        pytest.skip("native.cpp is not built")
    simd, threads = request.param != "plain C++", 16 if request.param == "16 threads" else 1
    runner = native.runner(simd, threads)
    monkeypatch.setattr(native, "runner", lambda *_: runner)


@pytest.fixture
def normal(rng):
    return lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))


def assert_near(call, atol=NEAR):
    with ops.only("reference"):
        expected = call()
    with ops.only("cpu"):
        for found, right in zip(call(), expected, strict=True):
            np.testing.assert_allclose(np.array(found), np.array(right), atol=atol, rtol=NEAR)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("D, H, R", [(128, 4, 64), (512, 20, 64), (192, 3, 64), (72, 1, 8)])
def test_attention(D, H, R, packed, normal, rng):
    rows, windows = normal(40 * 8, D), normal(3, 16, D)
    if packed:
        rows, windows = fp8_pack(rows, R), fp8_pack(windows, R)
    pages = ops.Paged(rows, mx.array(rng.integers(1, 40, (3, 20)).astype(np.int32)), 8)
    chosen, at = mx.array(np.sort(rng.integers(0, 150, (3, 33)), axis=1).astype(np.int32)), mx.array([0, 40, 600])
    inputs = normal(3, H * D), normal(3, R // 2), normal(3, R // 2), windows, at
    for which in (None, chosen):
        assert_near(lambda: [ops.attention_step(*inputs, pages, 150, which, 4, mx.zeros(H), EPS)])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_index_scores(heads, packed, normal, rng):
    q, rows = normal(2, heads, 128), normal(30 * 64, 128)
    if packed:
        q, rows = fp4_pack(q), fp4_pack(rows)
    paged = ops.Paged(rows, mx.array(rng.integers(1, 30, (2, 10)).astype(np.int32)), 64)
    weight = normal(2, heads)
    assert_near(lambda: [ops.index_scores_step(q, weight, paged, 555, 0.01)])


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("D", [64, 256, 1000])
def test_hyper_connections(tokens, D, normal):
    streams, fn = normal(tokens, 4, D), ops.Blocks(normal(24, 4 * D).view(mx.uint8), "F32")
    update = normal(tokens, D), normal(tokens, 4), normal(tokens, 4, 4)
    for some in (None, update):
        assert_near(lambda: ops.hyper_mix(streams, fn, some), atol=NEAR * 4 * D ** 0.5)
    sums = mx.concatenate([normal(tokens, 3, 24), mx.full((tokens, 3, 1), 4.0 * D / 3)], axis=-1)
    mixed = streams, sums, normal(3), normal(24), normal(D)
    assert_near(lambda: ops.hyper_enter(*mixed, 20, 1e-6, EPS))
    last = streams, mx.concatenate([sums[..., :4], sums[..., -1:]], axis=-1), normal(1), normal(4), normal(D)
    assert_near(lambda: [ops.hyper_leave(*last, 1e-6, EPS)])


@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1e-3, 1.0, 1e3, 1e9])
def test_packed_rows_are_those_of_the_reference_bit_for_bit(scale, normal):
    x, still = normal(50, 128) * scale, mx.zeros((50, 32))
    found = native_step.make_rows(x, native_step.Rows(128, 64, "fp8"), None, EPS, still + 1, still)
    np.testing.assert_array_equal(found, np.array(fp8_pack(x, 64)))


def test_every_e4m3_code_and_every_half_is_kept(normal):
    codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255])   # but for NaN
    values = mx.from_fp8(mx.array(np.resize(codes, (4, 64))), mx.float32)
    halves = np.arange(0, 0x7C00, dtype=np.uint16)[-4 * 7936:].reshape(4, -1)[:, ::124].copy().view(np.float16)[:, :64]
    row = mx.concatenate([values, mx.array(halves.astype(np.float32))], axis=1)
    row[:, 0] = 448.0       # the largest code: the scale is 1
    still = mx.zeros((4, 32))
    packed = native_step.make_rows(row, native_step.Rows(128, 64, "fp8"), None, EPS, still + 1, still)
    np.testing.assert_array_equal(np.array(fp8_unpack(mx.array(packed), 128, 64)), np.array(row))


def test_rows_that_native_cannot_take_are_left_to_the_reference():
    assert not native_step.Rows(66, 2, "fp8").fits() and not native_step.Rows(96, 32, "fp4").fits()
    assert native_step.Rows(128, 64, "fp8").fits() and native_step.Rows(72, 8, None).fits()
