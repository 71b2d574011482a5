"""A full-shape DeepSeek V4 Flash file of seeded random weights: 43 layers, 256 experts, the q2 recipe.

All layers of a kind point at the same bytes, so 80.8 GiB of tensors take 3.4 GiB on disk, while a token's work and
traffic are those of the real file. ds4 loads it; what ds4 answers is in tests/data/ds4. The text it gives is noise.

    python tests/slow/full_shape.py OUT.gguf TOKENIZER.json
"""
import json
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np

from ds4mlx.gguf.writer import write_gguf
from ds4mlx.models.deepseek_v4.config import FLASH

D, V, F, E = FLASH.hidden_size, FLASH.vocab_size, FLASH.moe_intermediate_size, FLASH.n_routed_experts
SLOTS, MIX = FLASH.num_experts_per_tok, FLASH.hc_mult * (2 + FLASH.hc_mult)
BLOCKS = {"Q8_0": (32, 34), "IQ2_XXS": (256, 66), "Q2_K": (256, 84)}                       # weights, bytes
SCALES = {"Q8_0": ((0, 0.02 / 73),), "IQ2_XXS": ((0, 0.02 / 60),), "Q2_K": ((80, 0.02 / 12), (82, 0.02 / 8))}

Tensor = tuple[str, str, tuple[int, ...], Callable[[], np.ndarray]]


class Weights:
    """Draws in the order in which the file is written, from one generator: the order is part of the recipe."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(7)
        self._made: dict[str, Callable[[], np.ndarray]] = {}

    def of(self, key: str, kind: str, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
        """What draws the tensor `key`: the same object for every tensor that shares it, and so its bytes."""
        return self._made.setdefault(key, lambda: self._draw(key, kind, prod(shape)))

    def _draw(self, key: str, kind: str, n: int) -> np.ndarray:
        if key.endswith(("norm.weight", "scale.weight")):
            return np.ones(n, np.float32)
        if kind == "I32":
            rows = np.stack([self._rng.permutation(E)[:SLOTS] for _ in range(4096)]).astype(np.int32)
            return rows[self._rng.integers(0, 4096, V)]
        if kind in ("F16", "F32"):
            return (self._rng.standard_normal(n, np.float32) * 0.02).astype(np.float16 if kind == "F16" else np.float32)
        return self._blocks(kind, n)

    def _blocks(self, kind: str, n: int) -> np.ndarray:
        weights, size = BLOCKS[kind]
        if kind == "Q8_0":
            blocks = np.empty((n // weights, size), np.uint8)
            blocks[:, 2:] = self._rng.integers(0, 256, (n // weights, 32), np.uint8)
        else:
            blocks = self._rng.integers(0, 256, (n // weights, size), np.uint8)
        for at, scale in SCALES[kind]:
            blocks[:, at:at + 2] = np.float16(scale).tobytes()[0], np.float16(scale).tobytes()[1]
        return blocks


def tensors() -> Iterator[Tensor]:
    """Every tensor in file order."""
    weights = Weights()
    for name, kind, shape in (("token_embd.weight", "F16", (V, D)), ("output_hc_base.weight", "F32", (4,)),
                              ("output_hc_fn.weight", "F16", (4, 4 * D)), ("output_hc_scale.weight", "F32", (1,)),
                              ("output_norm.weight", "F32", (D,)), ("output.weight", "Q8_0", (V, D))):
        yield name, kind, shape, weights.of(name, kind, shape)
    for i, ratio in enumerate(FLASH.compress_ratios):
        for name, kind, shape, key in layer(i, ratio):
            yield f"blk.{i}.{name}", kind, shape, weights.of(key or name, kind, shape)


def layer(i: int, ratio: int) -> Iterator[tuple[str, str, tuple[int, ...], str | None]]:
    """(name, kind, shape, key of the shared bytes where that is not the name)."""
    for half in ("attn", "ffn"):
        yield f"hc_{half}_fn.weight", "F16", (MIX, 4 * D), None
        yield f"hc_{half}_scale.weight", "F32", (3,), None
        yield f"hc_{half}_base.weight", "F32", (MIX,), None
    for name, kind, shape in (
            ("attn_norm", "F32", (D,)), ("ffn_norm", "F32", (D,)), ("attn_q_a", "Q8_0", (1024, D)),
            ("attn_q_a_norm", "F32", (1024,)), ("attn_q_b", "Q8_0", (32768, 1024)), ("attn_kv", "Q8_0", (512, D)),
            ("attn_kv_a_norm", "F32", (512,)), ("attn_sinks", "F32", (64,)), ("attn_output_a", "Q8_0", (8192, 4096)),
            ("attn_output_b", "Q8_0", (D, 8192))):
        yield f"{name}.weight", kind, shape, None
    if ratio:
        width = 1024 if ratio == 4 else 512
        for part, shape in (("ape", (ratio, width)), ("kv", (width, D)), ("gate", (width, D))):
            yield f"attn_compressor_{part}.weight", "F16", shape, f"c{ratio}{part}"
        yield "attn_compressor_norm.weight", "F32", (512,), None
    if ratio == 4:
        yield "indexer.attn_q_b.weight", "F16", (8192, 1024), None
        yield "indexer.proj.weight", "F16", (64, D), None
        for part, shape in (("ape", (4, 256)), ("kv", (256, D)), ("gate", (256, D))):
            yield f"indexer_compressor_{part}.weight", "F16", shape, None
        yield "indexer_compressor_norm.weight", "F32", (128,), None
    yield "ffn_gate_inp.weight", "F16", (E, D), None
    if i >= FLASH.num_hash_layers:
        yield "exp_probs_b.bias", "F32", (E,), None
    for part, kind, shape in (("gate", "IQ2_XXS", (E, F, D)), ("up", "IQ2_XXS", (E, F, D)),
                              ("down", "Q2_K", (E, D, F))):
        yield f"ffn_{part}_exps.weight", kind, shape, None
    for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        yield f"ffn_{part}_shexp.weight", "Q8_0", shape, None
    if i < FLASH.num_hash_layers:
        yield "ffn_gate_tid2eid.weight", "I32", (V, SLOTS), None


def metadata(tokenizer: Path) -> dict[str, object]:
    model = json.loads(tokenizer.read_text(encoding="utf-8"))
    names = {i: token for token, i in model["model"]["vocab"].items()}
    names |= {added["id"]: added["content"] for added in model["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["model"]["merges"]]
    return FLASH.to_gguf() | {
        "general.architecture": "deepseek4", "general.name": "DeepSeek V4 Flash synthetic",
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [names.get(i, f"<unused{i}>") for i in range(V)], "tokenizer.ggml.merges": merges}


def write(path: Path, tokenizer: Path) -> None:
    """About 30 s and 4 GB of memory; 3.4 GiB on disk."""
    write_gguf(path, metadata(tokenizer), tensors())


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
