"""Forced calls of the tiny model, whose weights are noise: the real engine under the same masks."""
import asyncio
import json
import random

import jsonschema
import pytest
from host import talk, user
from random_tools import random_tool

from ds4mlx.chat.events import gather
from ds4mlx.config import Settings
from ds4mlx.engine.protocol import Sampling
from ds4mlx.service.service import open_service
from ds4mlx.service.turn import Turn

PIECE = 50   # calls of one test: `-k` picks the pieces that are still to be run
SLOTS = 8    # in which 16 calls take 11 s of a core, one after the other 20 s: a step costs much the same for many


async def check_calls(path, seeds):
    service = open_service(Settings(model=path, ctx=4096, batched_session=SLOTS, mixed_prefill_quantum=1024))
    await service.start()
    try:
        await asyncio.gather(*(check_call(service, seed) for seed in seeds))
    finally:
        await service.close(5)


async def check_call(service, seed):
    tool = random_tool(random.Random(seed))
    asked = talk(user("Hi"), tools=(tool,), thinking=False, must_call=("run",))
    answer = await service.run(Turn(asked, Sampling(seed=seed), one_call=True))
    (name, arguments), = gather([event async for event in answer]).calls
    jsonschema.validate(json.loads(arguments), tool.schema["parameters"])
    assert name == "run"


def test_a_model_of_noise_makes_calls_that_satisfy_their_schemas(tiny_path):
    asyncio.run(check_calls(tiny_path, [5003, 5004]))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("first", range(5000, 6000, PIECE))
def test_a_thousand_random_schemas_are_satisfied_by_a_model_of_noise(tiny_path, first):
    asyncio.run(check_calls(tiny_path, range(first, first + PIECE)))
