import numpy as np
import pytest
from oracle.weights import CONFIG

from ds4mlx.models.deepseek_v4.config import FLASH, Config
from ds4mlx.models.deepseek_v4.rope import frequencies, tables

TABLES = [("main", False), ("compress", True)]


@pytest.mark.parametrize("name, compressed", TABLES)
def test_frequencies_are_the_independent_ones(name, compressed, units):
    found = frequencies(Config.from_official(CONFIG), compressed)
    np.testing.assert_allclose(found, units[f"rope.{name}.inv_freq"], rtol=1e-6)  # theirs are float32


@pytest.mark.parametrize("name, compressed", TABLES)
def test_tables_are_exact_for_their_frequencies_up_to_a_million(name, compressed, units):
    cos, sin = tables(units["rope.positions"], units[f"rope.{name}.inv_freq"].astype(np.float64))
    np.testing.assert_allclose(cos, units[f"rope.{name}.cos"], atol=1e-7)
    np.testing.assert_allclose(sin, units[f"rope.{name}.sin"], atol=1e-7)


def test_yarn_keeps_fast_pairs_and_slows_the_others_sixteen_times():
    plain = 160000 ** (-2 * np.arange(32) / 64)
    ratio = plain / frequencies(FLASH, compressed=True)
    np.testing.assert_allclose(ratio[:16], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[25:], 16, rtol=1e-12)
    assert (np.diff(ratio[15:26]) > 0).all()
