"""Encoders of the kinds that need a search, against the decoders and against exhaustive answers."""
import numpy as np
import pytest

from ds4mlx.gguf.dequant import IQ2_GRID, IQ2_SIGNS, dequantize
from ds4mlx.gguf.writer import quantize
from ds4mlx.quant import affine, codebook, compiled
from ds4mlx.quant.encode import SEARCHED, encode, smoothed

# Shares of the weights' energy that llama.cpp's quantiser loses on the matrices below, Gaussian and heavy-tailed: at
# equal importance; and with `importance`, weighed by it. Measured with `theirs` of tests/bench/quantizer_quality.py.
THEIRS = {"IQ2_XXS": ((0.1176, 0.0857), (0.2400, 0.1795)), "Q2_K": ((0.0715, 0.0542), (0.0945, 0.0784)),
          "Q4_K": ((0.0051, 0.0041), (0.0086, 0.0076))}


def weights(rows=16, heavy=False, seed=1):
    rng = np.random.default_rng(seed)
    drawn = rng.standard_t(3, (rows, 1024)) if heavy else rng.standard_normal((rows, 1024))
    return (drawn * 0.02).astype(np.float32)


def importance(seed=2):
    return np.exp(np.random.default_rng(seed).standard_normal(1024)).astype(np.float32)


def loss(x, kind, column=1.0, **options):
    """Share of the energy that is lost; `column` weighs both."""
    decoded = dequantize(encode(x, kind, **options), kind)
    return float((column * (decoded - x) ** 2).sum() / (column * x ** 2).sum())


@pytest.fixture(params=["compiled", "numpy"])
def how(request):
    if request.param == "compiled" and not compiled.built():
        pytest.skip("search.cpp is not built here")
    return {"compiled_too": request.param == "compiled"}


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("kind", SEARCHED)
def test_no_more_is_lost_than_by_the_quantiser_of_published_files(kind, heavy, how):
    x, column, (plain, weighed) = weights(heavy=heavy), importance(), THEIRS[kind][heavy]
    assert loss(x, kind, **how) < plain
    assert loss(x, kind, column, importance=column, **how) < weighed


@pytest.mark.parametrize("kind", SEARCHED)
def test_importance_lowers_the_error_that_counts(kind, how):
    x, column = weights(), importance()
    assert loss(x, kind, column, importance=column, **how) < 0.9 * loss(x, kind, column, **how)


@pytest.mark.parametrize("kind", SEARCHED)
def test_importance_does_not_cost_much_elsewhere(kind, how):
    """Columns that hardly count still get a tenth of the mean: their error stays within a quarter of the least."""
    x = weights()
    assert loss(x, kind, importance=importance(), **how) < 1.25 * loss(x, kind, **how)


@pytest.mark.parametrize("kind", SEARCHED)
def test_only_the_proportions_of_importance_count(kind):
    x, column = weights(4), importance()
    assert np.array_equal(encode(x, kind, column), encode(x, kind, column * np.float32(1024)))


@pytest.mark.parametrize("kind", SEARCHED)
def test_importance_of_nothing_is_that_of_everything(kind):
    x = weights(4)
    assert np.array_equal(encode(x, kind), encode(x, kind, np.zeros(1024, np.float32)))


def test_smoothed_importance_leaves_no_column_out():
    column = np.array([0, 0, 0, 4], np.float32)
    assert np.allclose(smoothed(column, 4), [0.1, 0.1, 0.1, 4.1])


@pytest.mark.parametrize("kind, weights_of", [("Q2_K", lambda q: 3 * q - 2), ("Q4_K", lambda q: 0.5 * q - 3)])
def test_weights_on_a_line_of_the_format_are_exact(kind, weights_of, how):
    codes = np.arange(256) % (4 if kind == "Q2_K" else 16)
    x = weights_of(codes).astype(np.float32)[None]
    assert np.abs(dequantize(encode(x, kind, **how), kind) - x).max() < 0.01  # the scale of a run is a rounded share


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K"])
def test_a_constant_negative_run_is_kept(kind, how):
    x = np.full((1, 256), -0.5, np.float32)
    assert np.abs(dequantize(encode(x, kind, **how), kind) + 0.5).max() < 1e-3  # dmin is a half-precision number


def test_eight_weights_take_the_best_row_of_the_codebook():
    """Of all 256 x 128 rows with signs, at the scale that was chosen, no other is nearer."""
    x = weights(1, seed=3)[:, :256]
    blocks = encode(x, "IQ2_XXS")
    chosen = dequantize(blocks, "IQ2_XXS").reshape(8, 32)
    word = blocks[0, 2:].reshape(8, 8)[:, 4:].copy().view("<u4")[:, 0]
    d = blocks[0, :2].view("<f2")[0].astype(np.float64)
    rows = (IQ2_GRID[:, None].astype(np.float64) * IQ2_SIGNS).reshape(-1, 8)
    for group, weights_, level in zip(x.reshape(8, 4, 8), chosen.reshape(8, 4, 8), word >> 28):
        nearest = ((group[:, None] - rows * d * (2 * level + 1) / 8) ** 2).sum(-1).min(-1)
        assert np.allclose(((group - weights_) ** 2).sum(-1), nearest, rtol=1e-3)  # sums of A and B in float32


@pytest.mark.parametrize("kind", SEARCHED)
def test_zeros_stay_zero(kind, how):
    assert not dequantize(encode(np.zeros((2, 256), np.float32), kind, **how), kind).any()


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-3, 1e3])
@pytest.mark.parametrize("kind", SEARCHED)
def test_any_scale_gives_finite_weights(kind, scale, how):
    """Far below half precision they become zeros, never anything else."""
    x = weights(2) * np.float32(scale)
    decoded = dequantize(encode(x, kind, **how), kind)
    assert np.abs(decoded).max() <= 3 * np.abs(x).max()


@pytest.mark.parametrize("kind", SEARCHED)
def test_threads_and_slabs_do_not_change_a_bit(kind, monkeypatch):
    x, whole = weights(8), encode(weights(8), kind, importance(), threads=1)
    monkeypatch.setattr("ds4mlx.quant.encode.COMPILED_SLAB_WEIGHTS", 2048)
    assert np.array_equal(encode(x, kind, importance(), threads=3), whole)


@pytest.mark.skipif(not compiled.built(), reason="search.cpp is not built here")
@pytest.mark.parametrize("simd", [True, False])
@pytest.mark.parametrize("heavy", [False, True])
def test_compiled_searches_find_what_numpy_finds(heavy, simd):
    """Nearly every block is the same. The others have another of two choices that are equal up to rounding."""
    x, w = weights(8, heavy).reshape(-1, 256), smoothed(importance(), 1024).reshape(-1, 256)
    ours = codebook.search(x, w), *(affine.search(x, w, line) for line in (affine.Q2_K, affine.Q4_K))
    theirs = (compiled.search_codebook(x, w, simd=simd),
              *(compiled.search_line(x, w, line, simd=simd) for line in (affine.Q2_K, affine.Q4_K)))
    for a, b in zip(ours, theirs):
        last = "row" if isinstance(a, codebook.Codes) else "code"
        assert (getattr(a, last) == getattr(b, last)).mean() > 0.98 and (a.d == b.d).mean() > 0.8


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "MXFP4"])
def test_other_kinds_are_rounded_to_nearest(kind):
    assert np.array_equal(encode(weights(2), kind, importance()), quantize(weights(2), kind))


@pytest.mark.parametrize("change, message", [
    (lambda x, w: (x * np.float32("nan"), w), "finite"), (lambda x, w: (x + np.float32(1e6), w), "at most 65504"),
    (lambda x, w: (x, w[:5]), "1024"), (lambda x, w: (x, -w), "at least 0"), (lambda x, w: (x[:, :100], w), "blocks")])
@pytest.mark.parametrize("kind", SEARCHED)
def test_what_cannot_be_encoded_is_refused(kind, change, message):
    with pytest.raises(ValueError, match=message):
        encode(*change(weights(1), importance())[:1], kind, change(weights(1), importance())[1])
