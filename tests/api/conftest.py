import pytest

import ds4mlx as ds


@pytest.fixture(scope="session")
def model(tiny_path):
    with ds.load(tiny_path, ds.Settings(ctx=1024)) as model:
        yield model


@pytest.fixture
def session(model):
    with model.session() as session:
        yield session
