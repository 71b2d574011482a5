"""A thousand random schedules: in whatever company, every answer is the one that its prompt gets alone."""
import random

import pytest
from schedules import QUANTUM, Counting, play, solo

from ds4mlx.errors import Cancelled
from ds4mlx.service.scheduler import Scheduler
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.policy import SaveRules
from ds4mlx.sessions.store import Store, StoreOptions

SCHEDULES_EACH = 50
RULES = SaveRules(min_tokens=64, interval=256, align=128)     # saves at all times


@pytest.fixture
def scheduled(v4_tokenizer, tmp_path):
    """scheduled(slots, disk): a running Scheduler over an engine that counts; the engine is `.stub`."""
    running = []

    def start(slots, disk=False):
        def open_engine():
            scheduler.stub = Counting()
            return scheduler.stub

        def open_store(engine, context):
            identity = Identity("00" * 8, "00" * 8, "00" * 8, "00" * 8, 1, 2)
            return Store(tmp_path / "kv", identity, engine.arrays, context, StoreOptions(4 << 20, RULES))

        scheduler = Scheduler(open_engine, v4_tokenizer, context=4096, slots=slots, prefill_chunk=256, quantum=QUANTUM,
                              **({"open_store": open_store} if disk else {}))
        scheduler.start()
        running.append(scheduler)
        return scheduler

    yield start
    for scheduler in running:
        scheduler.close(10)
        assert all(session.closed for session in scheduler.stub.opened)


def check(callers):
    for caller in callers:
        alone = solo(caller.wanted.ids, caller.max_tokens)
        if caller.leaves_after is None:
            assert caller.fault is None and caller.tokens == alone
        else:
            assert caller.tokens == alone[:len(caller.tokens)] and isinstance(caller.fault, Cancelled | None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 16])
def test_every_answer_is_the_one_its_prompt_gets_alone(scheduled, v4_tokenizer, slots, seed):
    scheduler, draw = scheduled(slots), random.Random(f"{slots} {seed}")
    donors = 0
    for _ in range(SCHEDULES_EACH):
        callers = play(scheduler, draw, v4_tokenizer.key_bytes_of_ids)
        check(callers)
        donors += sum(caller.donor is not None for caller in callers)
    assert all(len(slices) <= 1 and sum(slices) <= QUANTUM for slices in scheduler.stub.gaps)
    assert (slots == 1) == (donors == 0) == (max(scheduler.stub.rows) == 1) and max(scheduler.stub.rows) <= slots


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_states_that_go_to_disk_and_come_back_change_no_answer(scheduled, v4_tokenizer, slots):
    scheduler, draw, files, known = scheduled(slots, disk=True), random.Random(slots), 0, []
    for _ in range(SCHEDULES_EACH):
        callers = play(scheduler, draw, v4_tokenizer.key_bytes_of_ids, known)
        check(callers)
        known = [*known, *(caller.wanted.ids for caller in callers)][-40:]
        files += sum(bool(caller.file) for caller in callers)
    while scheduler.active or not scheduler.store.flush():
        pass
    stats = scheduler.store.stats()
    assert 0 < files <= stats.hits and stats.saved and not stats.failed and not stats.quarantined
