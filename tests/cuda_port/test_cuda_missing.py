"""What a machine without CuPy, a driver or a card is told."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"
FAILS = "def fails(*_): raise RuntimeError('as the driver says')\nfrom cupy import cuda\n"
NO_CARD = f"{FAILS}cuda.runtime.getDeviceCount = fails\n"


def told(before, path):
    """What `run --engine cuda` says to a machine of which the lines `before` hold."""
    code = (f"import sys\n{before}\nfrom ds4mlx.cli.main import main\n"
            f"sys.exit(main(['run', '--engine', 'cuda', '--no-lock', '-m', {str(path)!r}, '-p', 'x', '-n', '1']))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(STAND_IN), *sys.path])})
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    return result.stderr


@pytest.mark.parametrize("before, said", [
    ("sys.modules['cupy'] = None", r"its cupy is not installed here; pip install 'ds4mlx\[cuda\]'"),
    (f"{NO_CARD}cuda.runtime.driverGetVersion = lambda: 0", "no driver is installed here; install it"),
    (f"{NO_CARD}cuda.runtime.driverGetVersion = lambda: 12080", "the driver is of CUDA 12.8, the CuPy .* needs 13; "),
    (NO_CARD, r"no card can be used \(as the driver says\); see what nvidia-smi"),
    ("from cupy import cuda\ncuda.runtime.getDeviceCount = lambda: 0", "the driver shows no card"),
    (f"{FAILS}cuda.nvrtc.getVersion = fails", r"NVRTC, is not found here; pip install 'ds4mlx\[cuda\]' brings it"),
    ("from cupy import cuda\ncuda.Device.attributes = {'MaxSharedMemoryPerBlock': 49152}", "48 KB .*, kernels need 64"),
])
def test_cuda_without_what_it_needs_says_what_to_do(before, said, tiny_path):
    assert re.search(said, told(before, tiny_path))


def test_cuda_port_names_no_mlx():
    sources = [path.read_text("utf-8") for path in (Path(__file__).parents[2] / "cuda_port").rglob("*.py")]
    assert sources and not [text for text in sources if re.search(r"^\s*(import|from) mlx", text, re.MULTILINE)]
