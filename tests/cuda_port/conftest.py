"""Fixtures of the CUDA engine's tests. Those that need a card are skipped where there is none."""
from pathlib import Path

import numpy as np
import pytest
from oracle.model_file import write_oracle

ORACLE = Path(__file__).parents[1] / "oracle"
NEED_CARD = ("test_cuda_ops.py", "test_cuda_oracle.py", "test_cuda_engine.py", "test_cuda_products.py",
             "test_cuda_and_mlx.py")


def pytest_addoption(parser):
    parser.addoption("--plain", action="store_true", help="without tensor cores, clusters and early launches, as on "
                     "cards that lack them; of tests/cuda_port")


@pytest.fixture(scope="session", autouse=True)
def plain(request):
    if request.config.getoption("--plain", default=False):
        from ds4mlx.cuda_port import build, launch
        build.OPTIONS += ("-DDS4_PLAIN",)
        launch.can_overlap = lambda: False


def has_card() -> bool:
    try:
        import cupy
        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # whatever a missing package or driver raises
        return False


collect_ignore = [] if has_card() else list(NEED_CARD)


@pytest.fixture(scope="session")
def oracle_path(tmp_path_factory) -> Path:
    return write_oracle(tmp_path_factory.mktemp("oracle") / "oracle.gguf")


@pytest.fixture(scope="session")
def expected():
    """What an independent implementation computed (tests/oracle/README.md)."""
    with np.load(ORACLE / "expected.npz") as data:
        return dict(data)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
