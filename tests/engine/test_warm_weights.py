"""`--warm-weights`: a model file is in memory when it has been opened."""
import mmap
import sys
from pathlib import Path

import pytest

from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.gguf.reader import GGUF

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")


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


def test_warming_brings_in_every_page_of_a_file(tiny_path):
    with GGUF.open(tiny_path) as file:
        assert mapped(tiny_path) < pages(tiny_path)
        file.warm()
        assert mapped(tiny_path) == pages(tiny_path)


@pytest.mark.parametrize("warm", [False, True])
def test_an_engine_does_so_if_it_was_told_to(tiny_path, warm):
    engine = open_mlx(Settings(ctx=256, warm_weights=warm), tiny_path)
    assert (mapped(tiny_path) == pages(tiny_path)) == warm
    engine.close()
