"""Checkpoints on disk and their conversions, made once."""
from pathlib import Path

import pytest
from quant import checkpoints

from ds4mlx.quant.checkpoint import Checkpoint
from ds4mlx.quant.conversion import convert
from ds4mlx.quant.plan import Plan, make_plan
from ds4mlx.quant.recipe import recipe


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("published") / "V4-0731", checkpoints.as_published())


@pytest.fixture(scope="session")
def few_bits(tmp_path_factory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("few") / "V4-0731", checkpoints.in_few_bits()[0])


@pytest.fixture(scope="session")
def plan_of():
    def plan(source: Path, named: str = "q4", importance=None, **overrides: str) -> Plan:
        return make_plan(Checkpoint(source), recipe(named, overrides), importance, "V4-0731")
    return plan


@pytest.fixture(scope="session")
def converted(plan_of, tmp_path_factory):
    """converted(source, recipe): the GGUF, made once."""
    made: dict[tuple[Path, str], Path] = {}

    def make(source: Path, named: str) -> Path:
        if (source, named) not in made:
            made[source, named] = tmp_path_factory.mktemp("converted") / f"{named}.gguf"
            convert(plan_of(source, named), made[source, named])
        return made[source, named]
    return make
