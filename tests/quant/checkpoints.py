"""Checkpoints of the oracle's tiny model, in every spelling and every way of storing weights that there is."""
import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from oracle.weights import CONFIG, EXPERTS, weights

from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]     # name -> dtype, shape, data
FP8_SCALE, FP4_SCALE = 118, 122                             # E8M0: 2^-9 and 2^-5, which suit weights of 0.1
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@cache
def official() -> dict[str, np.ndarray]:
    return weights()


def write(directory: Path, tensors: Tensors, config: dict[str, object] = CONFIG,
          file: str = "model.safetensors") -> Path:
    """A directory with config.json, tokenizer.json and one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [*BYTE_OF, "!!", *(f"t{i}" for i in range(int(CONFIG["vocab_size"]) - len(CONTROL_LITERALS) - 257))]
    base = {name: i for i, name in enumerate(names, len(CONTROL_LITERALS))}
    added = [{"content": literal, "id": i} for i, literal in enumerate(CONTROL_LITERALS)]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": base, "merges": ["! !"]},
                                                          "added_tokens": added}))
    (directory / file).write_bytes(safetensors(tensors))
    return directory


def safetensors(tensors: Tensors) -> bytes:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def stored(array: np.ndarray, dtype: str) -> tuple[str, tuple[int, ...], bytes]:
    """BF16 only for arrays that it holds exactly, as the oracle's are."""
    if dtype == "BF16":
        return dtype, array.shape, (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return dtype, array.shape, array.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8"}[dtype]).tobytes()


def as_published(matrices: str = "BF16") -> Tensors:
    """Official names; matrices as given, vectors F32, tables I64."""
    return {name: stored(array, "I64" if array.dtype == np.int64 else matrices if array.ndim > 1 else "F32")
            for name, array in official().items()}


def as_transformers(renamed: dict[str, str]) -> Tensors:
    """Names of transformers' modules, experts stacked; `renamed` maps the other official names."""
    made = {renamed[name]: stored(array, "I64" if array.dtype == np.int64 else "F32")
            for name, array in official().items() if ".experts." not in name}
    for layer in range(int(CONFIG["num_hidden_layers"])):
        w1, w2, w3 = (np.stack([official()[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for e in range(EXPERTS)])
                      for w in ("w1", "w2", "w3"))
        place = f"model.layers.{layer}.mlp.experts"
        made[f"{place}.gate_up_proj"] = stored(np.concatenate([w1, w3], axis=1), "F32")
        made[f"{place}.down_proj"] = stored(w2, "F32")
    return made


FP8_PARTS = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")


def in_few_bits(seed: int = 3) -> tuple[Tensors, dict[str, np.ndarray]]:
    """The published way: experts in FP4, attention and shared experts in FP8, with scales; and the weights it means."""
    rng = np.random.default_rng(seed)
    made, meant = as_published(), dict(official())
    for name, array in official().items():
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            codes, exponents = rng.integers(0, 256, (array.shape[0], array.shape[1] // 2), np.uint8), rng.integers(
                FP4_SCALE - 1, FP4_SCALE + 2, (array.shape[0], array.shape[1] // 32), np.uint8)
            made[name] = "I8", codes.shape, codes.tobytes()
            made[f"{stem}.scale"] = "F8_E8M0", exponents.shape, exponents.tobytes()
            meant[name] = four_bits(codes, exponents)
        elif any(part in name for part in FP8_PARTS) and ".compressor." not in name:
            exponents = rng.integers(FP8_SCALE, FP8_SCALE + 2, [-(-n // 128) for n in array.shape], np.uint8)
            scale = np.repeat(np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 128, 0), 128, 1)
            scale = scale[:array.shape[0], :array.shape[1]]
            codes = np.array(mx.to_fp8(mx.array((array / scale).astype(np.float32))))
            made[name] = "F8_E4M3", array.shape, codes.tobytes()
            made[f"{stem}.scale"] = "F8_E8M0", exponents.shape, exponents.tobytes()
            meant[name] = np.array(mx.from_fp8(mx.array(codes), mx.float32)) * scale.astype(np.float32)
    return made, meant


def four_bits(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Weight by weight, as the format is described."""
    made = np.empty((codes.shape[0], codes.shape[1] * 2), np.float32)
    for half in (0, 1):
        nibble = codes >> 4 * half & 15
        made[:, half::2] = np.take(E2M1, nibble & 7) * np.where(nibble & 8, -1, 1)
    return made * np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, axis=1).astype(np.float32)
