"""What the engine does on the host, tried without a card."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "stand_in"


def run(script, *arguments):
    """How many kernels it launched."""
    cpp = shutil.which("cpp") or pytest.skip("no C preprocessor here")
    result = subprocess.run([sys.executable, HERE / script, *arguments, cpp], capture_output=True, text=True,
                            timeout=120,
                            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])})
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_cuda_launches_pass_what_their_kernels_take(tiny_path):
    assert run("launches.py", tiny_path) > 20


@pytest.mark.parametrize("card", ["H200", "DGX Spark", "RTX 5090", "Strix Halo"])
def test_cuda_operations_find_room_in_the_shared_memory_of_a_card(card):
    assert run("cards.py", card) > 5
