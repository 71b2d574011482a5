"""A thousand random schedules: in whatever company, every answer is the one that its prompt gets alone."""
import random

import pytest
from schedules import QUANTUM, Counting, play, solo

from ds4mlx.errors import Cancelled
from ds4mlx.service.scheduler import Scheduler

SCHEDULES_EACH = 50


@pytest.fixture
def scheduled(v4_tokenizer):
    """scheduled(slots): a running Scheduler over an engine that counts; the engine is `.stub`."""
    running = []

    def start(slots):
        def open_engine():
            scheduler.stub = Counting()
            return scheduler.stub

        scheduler = Scheduler(open_engine, v4_tokenizer, context=4096, slots=slots, prefill_chunk=256, quantum=QUANTUM)
        scheduler.start()
        running.append(scheduler)
        return scheduler

    yield start
    for scheduler in running:
        scheduler.close(10)
        assert all(session.closed for session in scheduler.stub.opened)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 16])
def test_every_answer_is_the_one_its_prompt_gets_alone(scheduled, v4_tokenizer, slots, seed):
    scheduler, draw = scheduled(slots), random.Random(f"{slots} {seed}")
    donors = 0
    for _ in range(SCHEDULES_EACH):
        for caller in play(scheduler, draw, v4_tokenizer.key_bytes_of_ids):
            alone = solo(caller.wanted.ids, caller.max_tokens)
            if caller.leaves_after is None:
                assert caller.fault is None and caller.tokens == alone
            else:
                assert caller.tokens == alone[:len(caller.tokens)] and isinstance(caller.fault, Cancelled | None)
            donors += caller.donor is not None
    assert all(len(slices) <= 1 and sum(slices) <= QUANTUM for slices in scheduler.stub.gaps)
    assert (slots == 1) == (donors == 0) == (max(scheduler.stub.rows) == 1) and max(scheduler.stub.rows) <= slots
