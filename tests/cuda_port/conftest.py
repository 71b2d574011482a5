"""Fixtures of the CUDA engine's tests. Those that need a card are skipped where there is none."""
from pathlib import Path

import numpy as np
import pytest
from oracle.weights import CONFIG, official_to_gguf_arrays, weights

from ds4mlx.gguf.writer import quantize, write_gguf
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.text.segments import CONTROL_LITERALS

ORACLE = Path(__file__).parents[1] / "oracle"
KINDS = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
NEED_CARD = ("test_cuda_ops.py", "test_cuda_oracle.py", "test_cuda_engine.py", "test_cuda_products.py")


def has_card() -> bool:
    try:
        import cupy
        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # whatever a missing package or driver raises
        return False


collect_ignore = [] if has_card() else list(NEED_CARD)


@pytest.fixture(scope="session")
def oracle_path(tmp_path_factory) -> Path:
    """The oracle's weights at F16, F32 and I32, which hold them exactly, with a vocabulary that only has the names."""
    config = Config.from_official(CONFIG)
    path = tmp_path_factory.mktemp("oracle") / "oracle.gguf"
    tokens = [*CONTROL_LITERALS, *(f"t{i}" for i in range(config.vocab_size - len(CONTROL_LITERALS)))]
    metadata = config.to_gguf() | {"general.architecture": "deepseek4", "tokenizer.ggml.model": "gpt2",
                                   "tokenizer.ggml.pre": "joyai-llm", "tokenizer.ggml.tokens": tokens,
                                   "tokenizer.ggml.merges": ["t 1"]}
    write_gguf(path, metadata, [(name, KINDS[a.dtype], a.shape, quantize(a, KINDS[a.dtype]))
                                for name, a in official_to_gguf_arrays(weights()).items()])
    return path


@pytest.fixture(scope="session")
def expected():
    """What an independent implementation computed (tests/oracle/README.md)."""
    with np.load(ORACLE / "expected.npz") as data:
        return dict(data)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
