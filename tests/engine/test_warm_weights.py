"""`--warm-weights`: a model file is in memory when it has been opened."""
import mmap
import shutil
import sys
from pathlib import Path

import pytest

from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.gguf.reader import GGUF

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")


@pytest.fixture
def own_file(tiny_path, tmp_path):
    """A file that nothing else in the process has mapped."""
    return Path(shutil.copy(tiny_path, tmp_path / "own.gguf"))


def mapped(path):
    """Bytes of the file whose pages are mapped now, as the system counts them; of the mapping that has most."""
    most, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            most = max(most, int(line.split()[1]) * 1024)
    return most


def pages(path):
    return -(-path.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE


def test_warming_brings_in_every_page_of_a_file(own_file):
    with GGUF.open(own_file) as file:
        assert mapped(own_file) < pages(own_file)
        file.warm()
        assert mapped(own_file) == pages(own_file)


@pytest.mark.parametrize("warm", [False, True])
def test_an_engine_does_so_if_it_was_told_to(own_file, warm):
    engine = open_mlx(Settings(ctx=256, warm_weights=warm), own_file)
    assert (mapped(own_file) == pages(own_file)) == warm
    engine.close()
