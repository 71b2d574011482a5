import importlib.util

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
