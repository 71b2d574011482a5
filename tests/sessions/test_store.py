"""A saved state is found by its text and comes back as it was."""
import os

import numpy as np
import pytest
from toy_store import history, job_for, key_of, load, open_store, same_state, save

from ds4mlx.sessions.toolmap import ToolBlock


@pytest.fixture
def store(tmp_path):
    with_store = open_store(tmp_path / "cache")
    yield with_store
    assert with_store.close()


@pytest.mark.parametrize("count", [512, 700, 2047, 2048, 2049, 6000])
def test_a_state_comes_back_as_it_was(store, count):
    tokens = history(count)
    assert save(store, tokens) == 1
    assert same_state(load(store, history(count + 50, seed=1, after=tokens)), tokens)


def test_a_state_survives_a_restart(tmp_path):
    tokens = history(3000)
    first = open_store(tmp_path / "cache")
    save(first, tokens)
    first.close()
    second = open_store(tmp_path / "cache")
    assert same_state(load(second, tokens), tokens)
    second.close()
