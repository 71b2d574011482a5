"""The NumPy decoders against the `gguf` package."""
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ds4mlx.gguf.blocks import BLOCK_TYPES, row_bytes
from ds4mlx.gguf.dequant import IQ2_GRID, IQ2_SIGNS, dequantize

FLOATS = [kind for kind in BLOCK_TYPES if kind != "I32"]


@pytest.mark.parametrize("kind", FLOATS)
def test_random_blocks_decode_exactly_as_the_gguf_package_does(kind):
    """Every bit pattern of scales occurs, infinities and NaN too; 2100 blocks pass the slab that is decoded at once."""
    raw = np.random.default_rng(1).integers(0, 256, (3, 700, BLOCK_TYPES[kind].bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, GGMLQuantizationType[kind])
    found = dequantize(raw, kind)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", FLOATS)
def test_layouts_are_those_of_the_gguf_package(kind):
    from gguf import GGML_QUANT_SIZES
    block = BLOCK_TYPES[kind]
    assert (block.weights, block.bytes) == GGML_QUANT_SIZES[GGMLQuantizationType(block.type_id)]
    assert GGMLQuantizationType(block.type_id).name == kind


def test_integers_stay_integers():
    table = np.array([[5, -1], [1 << 30, 0]], np.int32)
    found = dequantize(table.view(np.uint8), "I32")
    assert found.dtype == np.int32 and np.array_equal(found, table)


def test_a_slice_of_a_stack_decodes_like_the_stack():
    raw = np.random.default_rng(2).integers(0, 256, (4, 3, 2 * 84), np.uint8)
    assert np.array_equal(dequantize(raw[::2], "Q2_K"), dequantize(raw, "Q2_K")[::2], equal_nan=True)


def test_no_rows_give_no_weights():
    assert dequantize(np.empty((0, 66), np.uint8), "IQ2_XXS").shape == (0, 256)


def test_every_sign_row_has_an_even_number_of_minus_signs():
    assert np.all(IQ2_SIGNS.prod(axis=1) == 1) and len(np.unique(IQ2_SIGNS, axis=0)) == 128


def test_every_grid_row_is_one_of_its_own():
    assert len(np.unique(IQ2_GRID, axis=0)) == 256 and set(np.unique(IQ2_GRID)) == {8, 25, 43}


@pytest.mark.parametrize("raw, kind", [
    (np.zeros(65, np.uint8), "IQ2_XXS"), (np.zeros(66, np.int8), "IQ2_XXS"), (np.zeros(66, np.uint8), "IQ3_S")])
def test_bytes_that_are_no_blocks_are_refused(raw, kind):
    with pytest.raises(ValueError, match=kind):
        dequantize(raw, kind)


@pytest.mark.parametrize("width", [0, -256, 255, 300])
def test_a_row_is_whole_blocks(width):
    with pytest.raises(ValueError, match="whole number of Q2_K blocks"):
        row_bytes("Q2_K", width)
