"""search.cpp as built for another processor, run by qemu, by another compiler, and with sanitizers. Debian:
qemu-user-static, g++-aarch64-linux-gnu."""
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CHECK = Path(__file__).with_name("search_check.cpp")


@pytest.mark.parametrize("compiler, run", [
    (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64-static"]), (["clang++"], []),
    (["g++", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], [])])
def test_searches_lose_as_little_in_every_build(compiler, run, tmp_path):
    if not all(map(shutil.which, [compiler[0], *run[:1]])):
        pytest.skip(f"no {' or '.join([compiler[0], *run[:1]])} here")
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O2", "-g", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run([*compiler, *flags, CHECK, "-o", program], check=True)
    result = subprocess.run([*run, program], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and result.stdout.endswith("\n0 failures\n"), result.stdout + result.stderr
