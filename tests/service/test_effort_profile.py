"""Which effort texts a file's checkpoint takes, by the names in its metadata."""
import numpy as np
import pytest

from ds4mlx.config import Settings
from ds4mlx.service.encoding import as_recommended, effort_profile


@pytest.mark.parametrize("checkpoint, name, profile", [
    ("flash-0731", None, "0731"), (None, "DeepSeek V4 Flash 0731", "0731"), (None, "DeepSeek V4 Flash", "preview"),
    ("flash-preview", "made from 0731", "preview"), ("", "flash-0731", "0731"), (None, None, "preview"),
    (np.array([1, 2]), "flash-0731", "0731"), (["0731", "b"], None, "preview"), (731, np.array([]), "preview")])
def test_the_checkpoint_decides_then_the_name_where_they_are_text(checkpoint, name, profile):
    assert effort_profile(Settings(), {"ds4mlx.checkpoint": checkpoint, "general.name": name}) == profile


def test_what_the_user_says_comes_first():
    assert effort_profile(Settings(effort_profile="preview"), {"general.name": "flash-0731"}) == "preview"


@pytest.mark.parametrize("said, told, temperature", [
    (None, 0.0, 0.0), (0.7, 0.0, 0.7), (None, None, None), (0.0, 0.6, 0.0)])
def test_the_file_recommends_a_temperature_to_who_says_none(said, told, temperature):
    assert as_recommended(Settings(temp=said), {"general.sampling.temp": told}).temp == temperature
