"""The layout of a file before its data are there."""
import numpy as np

from ds4mlx.gguf.writer import layout, write_gguf

TENSORS = [("a", "F32", (3, 5)), ("b", "Q8_0", (2, 64)), ("c", "F16", (7,))]


def test_a_layout_is_that_of_the_written_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", {"k": 1}, [(*tensor, None) for tensor in TENSORS])
    written, planned = (tmp_path / "m.gguf").read_bytes(), layout({"k": 1}, TENSORS)
    assert written.startswith(planned.header) and len(written) == planned.nbytes


def test_offsets_are_where_the_data_are(tmp_path):
    data = [np.full(size, value, np.uint8) for value, size in ((1, 60), (2, 136), (3, 14))]
    write_gguf(tmp_path / "m.gguf", {}, [(*tensor, blocks) for tensor, blocks in zip(TENSORS, data)])
    written = (tmp_path / "m.gguf").read_bytes()
    assert [written[at] for at in layout({}, TENSORS).offsets] == [1, 2, 3]
