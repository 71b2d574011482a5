"""A checkpoint of training to a directory that `ds4mlx quantize --src` reads: safetensors, config.json, tokenizer.json.

    python -m ds4mlx.tiny.training.export CHECKPOINT... --out DIRECTORY
"""
import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from ds4mlx.models.deepseek_v4.config import GGUF_FLOATS, GGUF_INTS, OFFICIAL_KEYS, Config
from ds4mlx.tiny.training import checkpoint
from ds4mlx.tiny.training.shape import RATIOS, shape

KINDS = {"float32": "F32", "float16": "F16", "int64": "I64"}


def export(directory: Path, config: Config, weights: Mapping[str, np.ndarray]) -> None:
    """Write the weights, by the paths of `models.deepseek_v4.names`, under official names. The model answers best
    without chance, which generation_config.json tells."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = resources.files("ds4mlx.tiny.lessons") / "tokenizer.json"
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}) + "\n", "utf-8")
    (directory / "config.json").write_text(json.dumps(official(config), indent=1) + "\n", "utf-8")
    (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (directory / "model.safetensors").write_bytes(safetensors(dict(named(weights))))


def named(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Official name and array, experts one by one."""
    for path, array in weights.items():
        if ".experts_w" in path:
            stem, _, part = path.rpartition("experts_")
            yield from ((f"{stem}experts.{e}.{part}.weight", array[e]) for e in range(len(array)))
        elif path.endswith(("gate_bias", "gate_tid2eid")):
            yield path.replace("gate_", "gate."), array
        elif path.rpartition(".")[2].startswith(("hc_", "attn_sink", "ape")):
            yield path, array
        else:
            yield f"{path.replace('.shared_w', '.shared_experts.w')}.weight", array


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The file's bytes: length of the header, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": KINDS[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values())


def official(config: Config) -> dict[str, object]:
    """The config.json that `Config.from_official` reads."""
    flat = {OFFICIAL_KEYS.get(field, field): getattr(config, field)
            for field in [*GGUF_INTS, *GGUF_FLOATS, "swiglu_limit", "max_position_embeddings"]}
    scaling = {key.removeprefix("rope_scaling."): flat.pop(key) for key in OFFICIAL_KEYS.values() if key in flat}
    return flat | {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"],
                   "compress_ratios": list(config.compress_ratios), "rope_scaling": {"type": "yarn"} | scaling,
                   "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
                   "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}


def main() -> None:
    parser = ArgumentParser(prog="python -m ds4mlx.tiny.training.export", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="all files of a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    args = parser.parse_args()
    weights, about = checkpoint.load(args.files)
    export(args.out, shape(int(about["vocabulary"]), about.get("ratios", RATIOS)), weights)


if __name__ == "__main__":
    main()
