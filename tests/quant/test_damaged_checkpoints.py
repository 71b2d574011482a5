"""Checkpoints that are damaged, incomplete or of something else: refused before anything is written, by name."""
import json
import shutil

import numpy as np
import pytest
from oracle.weights import CONFIG
from quant import checkpoints

from ds4mlx.errors import ModelFileError
from ds4mlx.quant.conversion import convert

W1, WQ = "layers.1.ffn.experts.2.w1.weight", "layers.0.attn.wq_a.weight"


def f32(*shape):
    return checkpoints.stored(np.ones(shape), "F32")


@pytest.fixture
def copy(published, tmp_path):
    return shutil.copytree(published, tmp_path / "V4-0731")


def refused(plan_of, source, message):
    with pytest.raises(ModelFileError, match=message):
        plan_of(source)


@pytest.mark.parametrize("name, found, message", [
    (W1, None, rf"{W1} \[256, 256\] is missing"), (W1, f32(256, 128), r"F32 \[256, 128\], need \[256, 256\]"),
    ("norm.weight", f32(1, 256), r"need \[256\]"), ("hc_head_scale", f32(2), r"need \[1\]"),
    (WQ, ("I8", (128, 128), bytes(128 * 128)), "the scale of tensor .* is missing"),
    (WQ, ("I8", (128, 64), bytes(128 * 64)), "which as FP4 is not"),
    (WQ, ("F8_E4M3", (128, 256), bytes(128 * 256)), "the scale of tensor .* is missing"),
    (WQ, ("F64", (128, 256), bytes(8 * 128 * 256)), "is F64")])
def test_a_tensor_that_is_missing_or_another_is_named(name, found, message, plan_of, tmp_path):
    tensors = checkpoints.as_published() | {name: found}
    source = checkpoints.write(tmp_path / "c", {key: value for key, value in tensors.items() if value is not None})
    refused(plan_of, source, message)


def test_all_that_is_wrong_is_told_at_once(plan_of, tmp_path):
    tensors = checkpoints.as_published()
    del tensors[W1], tensors[WQ]
    refused(plan_of, checkpoints.write(tmp_path / "c", tensors), f"(?s){WQ}.*{W1}")


@pytest.mark.parametrize("shape, dtype, message", [
    ((1, 1), "F8_E8M0", r"F8_E8M0 \[1, 1\], need F8_E8M0 \[1, 2\]"), ((1, 2), "I64", "need F8_E8M0")])
def test_a_scale_of_another_shape_or_type_is_named(shape, dtype, message, plan_of, tmp_path):
    tensors = checkpoints.in_few_bits()[0]
    tensors["layers.0.attn.wq_a.scale"] = dtype, shape, bytes(int(np.prod(shape)) * (8 if dtype == "I64" else 1))
    refused(plan_of, checkpoints.write(tmp_path / "c", tensors), message)


@pytest.mark.parametrize("damage, message", [
    (lambda raw: raw[:5], "cut short before its header"), (lambda raw: raw[:1000], "announces a header"),
    (lambda raw: raw[:-1], "is at .* bytes; the file is cut short"),
    (lambda raw: b"\xff" * 8 + raw[8:], "announces a header"), (lambda raw: raw[:8] + b"[" + raw[9:], "no JSON object"),
    (lambda raw: raw[:8] + b"\xff" + raw[9:], "no JSON object"),
    (lambda raw: raw.replace(b'"dtype": "BF16"', b'"dtypo": "BF16"', 1), "is damaged"),
    (lambda raw: raw.replace(b'"data_offsets": [0, ', b'"data_offsets": [9, ', 1), "cut short or damaged"),
    (lambda raw: raw.replace(b'"shape": [512, ', b'"shape": [-12, ', 1), "is damaged")])
def test_a_damaged_file_is_refused(damage, message, copy, plan_of):
    file = copy / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(plan_of, copy, message)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_damaged_index_is_refused(text, copy, plan_of):
    (copy / "model.safetensors.index.json").write_text(text)
    refused(plan_of, copy, "no index")


@pytest.mark.parametrize("files, message", [({"a": "gone.safetensors"}, "No such file"),
                                            ({"gone.weight": "model.safetensors"}, "gone.weight")])
def test_an_index_of_what_is_not_there_is_refused(files, message, copy, plan_of):
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    refused(plan_of, copy, message)


def test_a_tensor_in_two_files_is_refused(copy, plan_of):
    shutil.copy(copy / "model.safetensors", copy / "again.safetensors")
    refused(plan_of, copy, "is also in")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name, copy, plan_of):
    (copy / name).unlink()
    refused(plan_of, copy, name.replace("model", r"\*"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100000])
def test_a_file_of_something_else_is_refused(name, text, copy, plan_of):
    (copy / name).write_text(text)
    refused(plan_of, copy, "not a model" if (name, text) == ("config.json", "{}") else name)


@pytest.mark.parametrize("change", [{"layer_types": [["x"]]}, {"layer_types": ["x"] * 5}, {"mlp_layer_types": 3},
                                    {"rope_parameters": {"compress": {}}}])
def test_a_configuration_of_something_else_is_refused(change, plan_of, tmp_path):
    config = {key: value for key, value in CONFIG.items()
              if key not in ("compress_ratios", "num_hash_layers", "rope_scaling")} | change
    refused(plan_of, checkpoints.write(tmp_path / "c", {}, config), "not a model")


@pytest.mark.parametrize("name, value", [(WQ, np.nan), (W1, np.inf), (W1, 1e6)])
def test_weights_that_no_file_can_hold_stop_the_conversion(name, value, plan_of, tmp_path):
    spoiled = checkpoints.official()[name].copy()
    spoiled[3, 5] = value
    tensors = checkpoints.as_published() | {name: checkpoints.stored(spoiled, "F32")}
    source = checkpoints.write(tmp_path / "c", tensors)
    with pytest.raises(ModelFileError, match=name):
        convert(plan_of(source, "q4"), tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_fp4_scales_that_are_no_numbers_stop_the_conversion(plan_of, tmp_path):
    tensors = checkpoints.in_few_bits()[0]
    scale = W1.replace("weight", "scale")
    dtype, shape, data = tensors[scale]
    source = checkpoints.write(tmp_path / "c", tensors | {scale: (dtype, shape, b"\xff" + data[1:])})
    with pytest.raises(ModelFileError, match="not finite"):
        convert(plan_of(source, "native"), tmp_path / "m.gguf")
