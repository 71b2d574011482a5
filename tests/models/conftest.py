"""The tiny oracle model, loaded from a GGUF through the whole of the loading path."""
from pathlib import Path

import numpy as np
import pytest
from oracle.model_file import write_oracle

from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import weights as loader
from ds4mlx.models.deepseek_v4.names import validate

ORACLE = Path(__file__).parents[1] / "oracle"


@pytest.fixture(scope="session")
def oracle_gguf(tmp_path_factory) -> Path:
    return write_oracle(tmp_path_factory.mktemp("oracle") / "oracle.gguf")


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
