"""What the engine does on the host, tried without a card."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "stand_in"


def test_cuda_launches_pass_what_their_kernels_take(tiny_path):
    cpp = shutil.which("cpp") or pytest.skip("no C preprocessor here")
    result = subprocess.run([sys.executable, HERE / "launches.py", tiny_path, cpp], capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": str(HERE)}, timeout=120)
    assert result.returncode == 0 and int(result.stdout) > 20, result.stderr
