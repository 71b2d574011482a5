"""The oracle's weights as a model file."""
from pathlib import Path

import numpy as np
from oracle.weights import CONFIG, official_to_gguf_arrays, weights

from ds4mlx.gguf.writer import quantize, write_gguf
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.text.segments import CONTROL_LITERALS

KINDS = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}


def write_oracle(path: Path) -> Path:
    """At F16, F32 and I32, which hold them exactly, with a vocabulary that only has the names. Returns the path."""
    config = Config.from_official(CONFIG)
    tokens = [*CONTROL_LITERALS, *(f"t{i}" for i in range(config.vocab_size - len(CONTROL_LITERALS)))]
    metadata = config.to_gguf() | {"general.architecture": "deepseek4", "tokenizer.ggml.model": "gpt2",
                                   "tokenizer.ggml.pre": "joyai-llm", "tokenizer.ggml.tokens": tokens,
                                   "tokenizer.ggml.merges": ["t 1"]}
    write_gguf(path, metadata, [(name, KINDS[a.dtype], a.shape, quantize(a, KINDS[a.dtype]))
                                for name, a in official_to_gguf_arrays(weights()).items()])
    return path
