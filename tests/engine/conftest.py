import pytest
from talks import bench


@pytest.fixture(scope="session")
def small():
    """A small model and its sessions: float32 rows, no lookahead."""
    return bench()
