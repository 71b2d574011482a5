"""What a machine without CuPy is told."""
import re
import subprocess
import sys
from pathlib import Path


def test_cuda_without_cupy_names_what_to_install(tiny_path):
    code = ("import sys\nsys.modules['cupy'] = None\nfrom ds4mlx.cli.main import main\n"
            f"sys.exit(main(['run', '--engine', 'cuda', '--no-lock', '-m', {str(tiny_path)!r}, '-p', 'x', '-n', '1']))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode and "pip install 'ds4mlx[cuda]'" in result.stderr and "Traceback" not in result.stderr


def test_cuda_port_names_no_mlx():
    sources = [path.read_text("utf-8") for path in (Path(__file__).parents[2] / "cuda_port").rglob("*.py")]
    assert sources and not [text for text in sources if re.search(r"^\s*(import|from) mlx", text, re.MULTILINE)]
