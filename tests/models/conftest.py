"""The tiny oracle model, loaded from a GGUF through the whole of the loading path."""
from pathlib import Path

import numpy as np
import pytest
from oracle.weights import CONFIG, official_to_gguf_arrays, weights

from ds4mlx.gguf.reader import GGUF
from ds4mlx.gguf.writer import quantize, write_gguf
from ds4mlx.models.deepseek_v4 import weights as loader
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.names import validate
from ds4mlx.text.segments import CONTROL_LITERALS

ORACLE = Path(__file__).parents[1] / "oracle"
KINDS = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}


@pytest.fixture(scope="session")
def oracle_gguf(tmp_path_factory) -> Path:
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
def oracle_file(oracle_gguf):
    with GGUF.open(oracle_gguf) as file:
        yield file


@pytest.fixture(scope="session")
def load_oracle(oracle_file):
    """load_oracle(kv_round="none", config=None) -> Model."""
    def load(kv_round="none", config=None):
        return loader.load(oracle_file, config or validate(oracle_file), kv_round)
    return load


@pytest.fixture(scope="session")
def expected():
    """What an independent implementation computed (tests/oracle/README.md)."""
    with np.load(ORACLE / "expected.npz") as data:
        return dict(data)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
