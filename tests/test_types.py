"""The public surface is typed, strictly, as `[tool.mypy]` says."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def mypy(*arguments):
    return subprocess.run([sys.executable, "-m", "mypy", "--cache-dir=/dev/null", *arguments], cwd=ROOT, text=True,
                          capture_output=True)


def test_the_public_surface_has_no_error_and_no_warning():
    found = mypy()
    assert found.returncode == 0 and found.stdout.startswith("Success"), found.stdout + found.stderr


def test_a_wrong_use_of_the_public_names_is_found(tmp_path):
    """What `import ds4mlx` gives on first use has its types all the same."""
    (tmp_path / "wrong.py").write_text("import ds4mlx as ds\n"
                                       "session = ds.load(\"tiny\").session()\n"
                                       "session.rewind(\"ten\")\n"
                                       "text: int = session.chat(\"Hi\").text\n")
    found = mypy(str(tmp_path / "wrong.py")).stdout
    assert "wrong.py:3: error" in found and "wrong.py:4: error" in found and "Found 2 errors" in found
