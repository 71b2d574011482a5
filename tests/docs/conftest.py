import importlib.util
import subprocess
import sys

import pytest

from document import ROOT


@pytest.fixture(scope="session")
def site_builder():
    """docs/build.py, which is a script and no module of the package."""
    pytest.importorskip("pdoc")
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder


@pytest.fixture(scope="package")
def tiny_server():
    """The port of a server over the built-in model."""
    command = [sys.executable, "-m", "ds4mlx", "serve", "-m", "tiny", "--port", "0", "--ctx", "131072",
               "--no-lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        yield int(server.stdout.readline().strip().rpartition(":")[2])
        server.terminate()
