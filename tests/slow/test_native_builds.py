"""native.cpp as built for another processor, run by qemu, and with sanitizers. Debian: qemu-user-static,
g++-aarch64-linux-gnu."""
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CHECK = Path(__file__).with_name("native_check.cpp")


@pytest.mark.parametrize("instructions, compiler, run", [
    ("NEON", ["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64-static"]),
    ("", ["g++", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], []),
    ("", ["g++", "-fsanitize=thread"], ["setarch", "-R"]),  # its shadow memory and random addresses do not go together
])
def test_vectors_and_plain_code_agree(instructions, compiler, run, tmp_path):
    if not all(map(shutil.which, [compiler[0], *run[:1]])):
        pytest.skip(f"no {' or '.join([compiler[0], *run[:1]])} here")
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compiler, *flags, CHECK, "-o", program], check=True)
    result = subprocess.run([*run, program], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and instructions in result.stdout, result.stdout + result.stderr
    assert result.stdout.endswith(": 0 differences\n")
