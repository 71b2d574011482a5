"""What the first Ctrl+C is for."""
import asyncio
from dataclasses import replace

import pytest

from ds4mlx.cli.interrupt import Interrupt
from ds4mlx.config import Settings
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat
from ds4mlx.service.service import open_service


async def ended(settings, signalled):
    """Why an answer ends that is given up, or not, while its prompt is made."""
    service, interrupt = open_service(settings), Interrupt()
    await service.start()
    try:
        interrupt.asks()
        if signalled:
            interrupt()
        turn = read_chat(Fields({"messages": [{"role": "user", "content": "Hi"}]}), settings).turn
        interrupt.watch(answer := await service.run(turn))
        return [event async for event in answer][-1].reason
    finally:
        await service.close(0.0)


@pytest.mark.parametrize("signalled, reason", [(False, "stop"), (True, "cancelled")])
def test_before_an_answer_begins_it_ends_that_answer_and_not_the_program(tiny_path, signalled, reason):
    settings = replace(Settings(), model=tiny_path, engine="stub")
    assert asyncio.run(ended(settings, signalled)) == reason
