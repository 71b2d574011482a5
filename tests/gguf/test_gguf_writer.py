"""Files of our writer, read by our reader and by the `gguf` package; encoders against their decoders."""
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.gguf.dequant import E2M1, dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.gguf.writer import quantize, write_gguf

METADATA = {
    "general.architecture": "test", "text": "naïve ｜", "small": 7, "negative": -7, "wide": 1 << 40, "real": 0.5,
    "yes": True, "words": ["a", "", "中"], "counts": [1, 2, 3], "reals": [0.5, 1.0], "flags": [True, False],
    "u64": np.uint64(9), "doubles": np.array([0.1, 0.2]), "i16": np.array([-1, 1], np.int16)}


@pytest.fixture
def blocks():
    """Random blocks of every kind, two rows of two blocks."""
    rng = np.random.default_rng(3)
    return {kind: rng.integers(0, 256, (2, 2 * block.bytes), np.uint8) for kind, block in BLOCK_TYPES.items()}


def tensors_of(blocks):
    return [(f"t.{kind}", kind, (2, 2 * BLOCK_TYPES[kind].weights), raw) for kind, raw in blocks.items()]


def test_every_kind_of_metadata_comes_back(tmp_path):
    write_gguf(tmp_path / "m.gguf", METADATA, [])
    with GGUF.open(tmp_path / "m.gguf") as file:
        assert list(file.metadata) == list(METADATA)
        for key, value in METADATA.items():
            assert np.array_equal(file.metadata[key], value) and not isinstance(file.metadata[key], np.generic), key


def test_every_kind_of_tensor_comes_back(tmp_path, blocks):
    write_gguf(tmp_path / "m.gguf", METADATA, tensors_of(blocks))
    with GGUF.open(tmp_path / "m.gguf") as file:
        for kind, raw in blocks.items():
            info = file.tensors[f"t.{kind}"]
            assert (info.kind, info.shape, info.nbytes) == (kind, (2, 2 * BLOCK_TYPES[kind].weights), raw.nbytes)
            assert np.array_equal(file.raw(f"t.{kind}"), raw)


def test_the_gguf_package_reads_the_same(tmp_path, blocks):
    write_gguf(tmp_path / "m.gguf", METADATA, tensors_of(blocks))
    theirs = GGUFReader(tmp_path / "m.gguf")
    for key, value in METADATA.items():
        assert np.array_equal(theirs.fields[key].contents(), value), key
    for tensor in theirs.tensors:
        kind = tensor.name.removeprefix("t.")
        assert tensor.tensor_type.name == kind and tensor.data_offset % 32 == 0
        assert np.array_equal(tensor.data.reshape(2, -1).view(np.uint8), blocks[kind])


def test_a_function_gives_its_data_when_its_turn_comes(tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, [("a", "F32", (8,), lambda: np.arange(8, dtype=np.float32))])
    with GGUF.open(tmp_path / "m.gguf") as file:
        assert np.array_equal(dequantize(file.raw("a"), "F32"), np.arange(8))


def test_the_same_data_is_written_once(tmp_path):
    row = np.ones(1024, np.float32)
    write_gguf(tmp_path / "m.gguf", {}, [(f"t{i}", "F32", (1024,), row) for i in range(100)])
    assert (tmp_path / "m.gguf").stat().st_size < 3 * row.nbytes
    with GGUF.open(tmp_path / "m.gguf") as file:
        assert len({info.offset for info in file.tensors.values()}) == 1 and file.raw("t99").nbytes == row.nbytes


def test_another_alignment_is_kept(tmp_path):
    write_gguf(tmp_path / "m.gguf", {"general.alignment": 256}, [(n, "F32", (1,), None) for n in "abc"])
    with GGUF.open(tmp_path / "m.gguf") as file:
        assert {info.offset % 256 for info in file.tensors.values()} == {0}


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="tensor a F32 .* needs 32 bytes, got 4"):
        write_gguf(path, {}, [("a", "F32", (8,), np.zeros(1, np.float32))])
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [1 << 64, 1j, np.zeros((2, 2)), np.float16(1), [[1], [2]]])
def test_metadata_that_gguf_cannot_hold_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match="metadata key k"):
        write_gguf(tmp_path / "m.gguf", {"k": value}, [])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_rounding_is_that_of_the_gguf_package(kind):
    x = np.random.default_rng(4).standard_normal((500, 64)).astype(np.float32) * np.float32(10)
    x[0], x[1] = np.arange(64) * 0.5, 0  # ties, zeros
    expected = quants.quantize(x, GGMLQuantizationType[kind]).view(np.uint8)
    assert np.array_equal(quantize(x, kind), expected)


def test_q8_0_is_within_half_a_step():
    x = np.random.default_rng(5).standard_normal((50, 64)).astype(np.float32)
    error = np.abs(dequantize(quantize(x, "Q8_0"), "Q8_0") - x).reshape(50, 2, 32)
    step = np.abs(x).reshape(50, 2, 32).max(axis=-1, keepdims=True) / 127
    assert np.all(error <= step * (0.5 + 127 * 2**-11))  # the stored step is off by 2^-11 of itself, 127 times


def test_mxfp4_takes_the_nearest_code():
    """Among all values of the chosen exponent, none is nearer; a weight is never clamped."""
    x = np.random.default_rng(6).standard_normal((50, 32)).astype(np.float32)
    blocks = quantize(x, "MXFP4")
    values = np.ldexp(E2M1.astype(np.float64), blocks[:, :1].astype(int) - 127)
    nearest = np.abs(x[..., None] - values[:, None]).min(axis=-1)
    assert np.array_equal(np.abs(dequantize(blocks, "MXFP4") - x.astype(np.float64)), nearest)
    assert np.all(np.abs(x) <= np.abs(values).max(axis=-1, keepdims=True))


def test_mxfp4_ties_go_to_the_even_code():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
    x = np.concatenate([ties, -ties, np.zeros(16, np.float32)])[None]
    even = np.array([0, 1, 1, 2, 2, 4, 4, 6])
    assert np.array_equal(dequantize(quantize(x, "MXFP4"), "MXFP4")[0, :16], np.concatenate([even, -even]))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "MXFP4"])
def test_encoded_weights_encode_to_themselves(kind):
    x = np.random.default_rng(7).standard_normal((10, 64)).astype(np.float32)
    once = dequantize(quantize(x, kind), kind)
    assert np.array_equal(dequantize(quantize(once, kind), kind), once)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "MXFP4"])
def test_zeros_stay_zeros(kind):
    assert not dequantize(quantize(np.zeros((2, 32), np.float32), kind), kind).any()


@pytest.mark.parametrize("value, kind, message", [
    (np.inf, "Q8_0", "finite"), (np.nan, "F16", "finite"), (1e5, "F16", "too large"), (1e8, "Q8_0", "too large"),
    (0.5, "I32", "whole"), (1.0, "Q2_K", "no encoder")])
def test_weights_that_a_kind_cannot_hold_are_refused(value, kind, message):
    with pytest.raises(ValueError, match=message):
        quantize(np.full((1, 256), value, np.float32), kind)
