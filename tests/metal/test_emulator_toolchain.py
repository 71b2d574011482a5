"""Which compiler is taken, and where what it makes is kept."""
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4mlx.metal_kernels import emulator
from ds4mlx.metal_kernels.emulator import EmulatorError, NoCompilerError, metal_kernel
from ds4mlx.metal_kernels.emulator.toolchain import Compiler, Store, find_compiler

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the emulator runs on Linux")


def only(*names):
    """A machine that has just these compilers."""
    return lambda name: f"/bin/{name}" if name in names else None


@linux
def test_the_newest_clang_is_taken():
    assert find_compiler(only("clang++-17", "clang++-19", "clang++")) == Compiler(("/bin/clang++-19",))
    assert find_compiler(only("clang++"), version=lambda path: 17) == Compiler(("/bin/clang++",))


@linux
def test_without_clang_the_one_inside_ziglang_is_taken_and_what_it_cannot_see_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        found = find_compiler(only("g++"), has_module=lambda name: name == "ziglang")
    assert found == Compiler((sys.executable, "-m", "ziglang", "c++"), is_clang=False)
    assert "blind to casts between address spaces" in caplog.text


@linux
def test_with_none_or_an_old_one_the_error_says_what_to_install():
    with pytest.raises(NoCompilerError, match="apt-get install .*clang-19, or pip install ziglang"):
        find_compiler(only("clang++"), has_module=lambda name: False, version=lambda path: 16)


def test_the_folder_of_compiled_kernels_is_private(tmp_path):
    Store.open(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "new").chmod(0o777)
    with pytest.raises(EmulatorError, match="others may write there; chmod 700 it"):
        Store.open(tmp_path / "new")


def test_what_is_made_is_made_once_and_whole(tmp_path):
    store, made = Store.open(tmp_path / "store"), []

    def build(path):
        path.write_text("half")
        if not made:
            made.append(path)
            raise OSError("disk full")

    with pytest.raises(OSError):
        store.make("kernel.so", build)
    assert not any(store.folder.iterdir())
    assert store.make("kernel.so", build).read_text() == "half"
    assert store.make("kernel.so", lambda path: made.append(path)).exists() and len(made) == 1


def test_a_kernel_compiles_into_the_folder_it_is_given_and_is_found_there_again(tmp_path):
    for _ in range(2):
        kernel = metal_kernel("constant", ["x"], ["y"], "y[thread_position_in_grid.x] = x;", cache=tmp_path / "cache")
        (y,) = kernel(inputs=[3], grid=(4, 1, 1), threadgroup=(4, 1, 1), output_shapes=[(4,)], output_dtypes=[np.int32])
        assert y.tolist() == [3] * 4
    assert len(list((tmp_path / "cache").glob("constant-*.so"))) == 1


def test_the_emulator_reads_no_environment_and_works_without_mlx():
    texts = [path.read_text("utf-8") for path in Path(emulator.__file__).parent.glob("*.py")]
    assert not any(re.search(r"os\.environ|getenv|import environ", text) for text in texts)
    code = "import sys; sys.modules['mlx'] = None; import ds4mlx.metal_kernels.emulator"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0
