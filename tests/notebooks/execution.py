"""Run the notebooks and keep what they show.

    python tests/notebooks/execution.py [--check] [NAME ...]    those whose file names contain one of the words; or all

--check keeps nothing. A cell that fails, or that warns, is the end.
"""
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import matplotlib.font_manager  # noqa: F401  makes the cache of fonts, of which a kernel would complain
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
CELL_S = 300


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook as a fresh kernel runs it, in an empty folder. Raises CellExecutionError where a cell fails.

    Nothing of it tells of the machine: no times of cells, no version of Python.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        sockets = Config({"AsyncKernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        client = NotebookClient(notebook, config=sockets, kernel_name="python3", timeout=CELL_S, record_timing=False,
                                coalesce_streams=True, resources={"metadata": {"path": folder}})
        client.execute(env=os.environ | {"IPYTHONDIR": folder})
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                         "language_info": {"name": "python"}}
    return notebook


def warnings_of(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.text for cell in notebook.cells for output in cell.get("outputs", ())
                   if output.get("name") == "stderr")


def main() -> None:
    check, words = "--check" in sys.argv, [word for word in sys.argv[1:] if word != "--check"] or [""]
    for path in NOTEBOOKS:
        if any(word in path.name for word in words):
            began = perf_counter()
            notebook = executed(path)
            if complaints := warnings_of(notebook):
                sys.exit(f"{path.name}: {complaints}")
            if not check:
                nbformat.write(notebook, path)
            print(f"{path.name}: {perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
