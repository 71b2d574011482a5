"""Each notebook runs on the built-in model, and what is committed of it is what a reader wants to see."""
import subprocess
import sys

import execution
import nbformat
import pytest
from execution import NOTEBOOKS

MOST_BYTES = 250_000
MACHINE = ("/tmp/", "/home/", "/root/", "/Users/", "/private/", "site-packages")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def pictures(cell):
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", ())]


def said(cell):
    """All text that a cell shows."""
    return "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def test_there_are_eight():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{i}_" for i in range(1, 9)]


def test_it_runs_from_top_to_bottom_without_a_warning(path):
    ran = subprocess.run([sys.executable, execution.__file__, "--check", path.name], capture_output=True, text=True)
    assert ran.returncode == 0 and path.name in ran.stdout, ran.stderr


def test_a_picture_s_data_is_asserted_where_it_is_drawn(cells):
    assert any(pictures(cell) and "\nassert " in cell.source for cell in cells)


def test_outputs_are_there_in_order(cells):
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) // 2


def test_it_is_small(path):
    assert path.stat().st_size < MOST_BYTES


def test_nothing_of_the_machine_is_in_it(cells):
    for cell in cells:
        assert not [word for word in MACHINE if word in cell.source + said(cell)]
        assert not cell.metadata


def test_cells_are_short(cells):
    assert max(len(cell.source.splitlines()) for cell in cells) <= 25
    assert max(len(line) for cell in cells for line in cell.source.splitlines()) <= 120
