"""What a user installs: sdist and wheel, built from a copy of the tree, and the wheel in an empty environment."""
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).parents[1]
ROOTS = {"src/ds4mlx": "ds4mlx", "metal_kernels": "ds4mlx/metal_kernels", "cuda_port": "ds4mlx/cuda_port"}
UNSHIPPED = {"ds4mlx/tiny/noise/paragraphs.txt"}    # what the vocabulary of noise was made of
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
MADE_HERE = shutil.ignore_patterns("__pycache__", "*.so")
LIMIT_S = 600   # for an index that hangs


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy without what earlier builds left behind, which setuptools would pack."""
    tree = tmp_path_factory.mktemp("tree")
    for root in ROOTS:
        shutil.copytree(ROOT / root, tree / root, ignore=MADE_HERE)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """(sdist, the wheel that is built from it)."""
    out = tmp_path_factory.mktemp("dist")
    told = run(sys.executable, "-m", "build", "--outdir", out, tree)
    assert "Deprecat" not in told.stderr + told.stdout and "would be ignored" not in told.stderr + told.stdout
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def contents(wheel):
    """name -> bytes; without what a compiler made, and without the list of sums."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()
                if not name.endswith((".so", "/RECORD", "/WHEEL"))}


def test_the_wheel_holds_every_file_of_the_package(built, tree):
    wanted = {f"{package}/{path.relative_to(tree / root).as_posix()}" for root, package in ROOTS.items()
              for path in (tree / root).rglob("*") if path.is_file()}
    held = {name for name in contents(built[1]) if ".dist-info/" not in name}
    assert held == wanted - UNSHIPPED
    kinds = {Path(name).suffix for name in held}
    assert kinds >= {".metal", ".h", ".cu", ".cuh", ".html", ".typed", ".jsonl", ".json"}


def test_the_compiled_parts_are_in_it(built):
    with zipfile.ZipFile(built[1]) as archive:
        assert {Path(name).name.partition(".")[0] for name in archive.namelist() if name.endswith(".so")} == {
            "_native", "_search"}


def test_the_tree_gives_the_same_wheel_as_the_sdist(built, tree, tmp_path):
    # A compiler that fails: what it makes is left out of the comparison, and is optional.
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, tree, env=os.environ | {"CC": "false",
                                                                                              "CXX": "false"})
    (wheel,) = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(built[1])


def test_the_sdist_holds_nothing_that_is_no_source(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if "/" in name}
    assert names >= {"README.md", "LICENSE", "pyproject.toml", "setup.py", "src/ds4mlx/ops/native_lanes.h"}
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".", "tests", "build"))]


def test_installed_into_an_empty_environment_it_answers(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt",
        built[1])
    place = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONWARNINGS": "error"}
    answer = run(tmp_path / "venv/bin/ds4mlx", "run", "-m", "tiny", "-p", "hello", "--nothink", "-n", "40",
                 cwd=tmp_path, env=place)
    assert answer.stdout.strip() and "generation" in answer.stderr
    run(tmp_path / "venv/bin/python", "-c", "import ds4mlx; ds4mlx.load; ds4mlx.for_mlx_lm", cwd=tmp_path, env=place)
