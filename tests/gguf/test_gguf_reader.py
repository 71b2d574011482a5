"""Opening a file: cheap whatever its size, lazy, and exact about what may share bytes."""
import json
import subprocess
import sys

import numpy as np
import pytest
from sparse_model import metadata_of, tensors_of, write_model

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF
from ds4mlx.gguf.writer import write_gguf
from ds4mlx.models.deepseek_v4.config import FLASH

OPEN = """
import json, sys, time
import numpy
from ds4mlx.gguf.reader import GGUF
start = time.process_time()     # a busy machine is no fault of the reader
with GGUF.open(sys.argv[1]) as file:
    seconds = time.process_time() - start
    peak_kb = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
    tensors = file.tensors.values()
    print(json.dumps([seconds, peak_kb / 1024, len(tensors), sum(t.nbytes for t in tensors), file.metadata["n"]]))
"""


@pytest.fixture(scope="module")
def flash_file(tmp_path_factory):
    """Flash's q2 file, 80.8 GiB, with a real-sized vocabulary; the weights are a hole."""
    metadata = metadata_of(FLASH) | {"tokenizer.ggml.merges": [f"ab c{i}" for i in range(127741)], "n": 5}
    return write_model(tmp_path_factory.mktemp("flash") / "flash.gguf", metadata, tensors_of(FLASH))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_flash_takes_under_a_second_of_a_core_and_300_mb(flash_file):
    """1328 tensors, and the byte count of the published file."""
    child = subprocess.run([sys.executable, "-c", OPEN, flash_file], capture_output=True, text=True, check=True)
    seconds, peak_mb, tensors, nbytes, _ = json.loads(child.stdout)
    assert seconds < 1 and peak_mb < 300
    assert (tensors, nbytes) == (1328, 86_714_775_900)


def test_the_sparse_flash_file_is_sparse(flash_file):
    stat = flash_file.stat()
    assert stat.st_size > 80 << 30 and stat.st_blocks * 512 < 64 << 20


def test_raw_bytes_are_read_only_views_of_the_mapping(tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, [("a", "Q8_0", (2, 3, 64), np.ones((6, 68), np.uint8))])
    with GGUF.open(tmp_path / "m.gguf") as file:
        raw = file.raw("a")
        assert raw.shape == (2, 3, 68) and not raw.flags.writeable and not raw.flags.owndata


def test_a_view_outlives_the_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, [("a", "F32", (8,), np.ones(8, np.float32))])
    with GGUF.open(tmp_path / "m.gguf") as file:
        raw = file.raw("a")
    assert np.all(raw.view(np.float32) == 1)


def test_a_tensor_of_an_unknown_type_matters_only_when_it_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, [("known", "F32", (8,), None), ("other", "Q4_K", (256,), None)])
    path.write_bytes(path.read_bytes().replace(b"\x0c\0\0\0" + bytes([32]), b"\x17\0\0\0" + bytes([32])))
    with GGUF.open(path) as file:
        assert file.tensors["other"].kind == "type 23" and file.raw("known").nbytes == 32
        with pytest.raises(ModelFileError, match="other is of type 23"):
            file.raw("other")


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, [])
    with GGUF.open(tmp_path / "m.gguf") as file, pytest.raises(ModelFileError, match="no tensor output.weight"):
        file.raw("output.weight")
