"""Several requests on one engine thread: what a round computes for whom, and what the others do not notice."""
import itertools
import threading

import pytest
from recorder import Recorder
from schedules import EOS, Counting, solo

from ds4mlx.engine.stub import Gate
from ds4mlx.errors import BadRequest, Cancelled
from ds4mlx.service.scheduler import Scheduler
from ds4mlx.service.slot import Ending

LONG = list(range(2, 402))


@pytest.fixture
def hold(serving, ask):
    """hold(count, ...): a Scheduler whose first `count` requests, of one token each, wait at a Gate for their first
    step; the Gate is `.gate`, the requests `.held`."""
    def start(count=1, tokens=1000, **options):
        scheduler = serving(lambda prompt: [7] * tokens if len(prompt) == 1 else [8], slots=4, **options)
        scheduler.gate = scheduler.stub.before_decode = Gate()
        scheduler.held = []
        for number in range(count):
            scheduler.held.append(ask(scheduler, [2 + number], wait=False, max_tokens=tokens + 1))
        assert scheduler.gate.reached.wait(60)
        return scheduler

    return start


# ---- steps

def test_all_that_decode_take_one_step_together(v4_tokenizer):
    scheduler = Scheduler(Counting, v4_tokenizer, context=4096, slots=4)
    scheduler.start()
    gate = Gate()
    scheduler._engine.before_prefill = gate
    requests = [Recorder([n, n, n], v4_tokenizer.key_bytes_of_ids([n, n, n])) for n in range(20, 24)]
    for request in requests:
        scheduler.submit(request)
    gate.opened.set()
    assert all(request.finished.wait(60) for request in requests)
    assert [request.tokens for request in requests] == [solo([n] * 3, 100) for n in range(20, 24)]
    scheduler.close(10)
    assert max(scheduler._engine.rows) > 1


def test_of_a_step_that_fails_only_who_fails_alone_is_given_up(serving, ask):
    def script(prompt):
        if prompt[0] == 13:
            raise ArithmeticError("the logits are not finite")
        return [7] * 50

    scheduler, gate = serving(script, slots=4), Gate()
    scheduler.stub.before_prefill = gate
    requests = [ask(scheduler, [n], wait=False) for n in (11, 12, 13, 14)]
    gate.opened.set()
    assert all(request.finished.wait(60) for request in requests)
    assert [type(request.fault) for request in requests] == [type(None), type(None), ArithmeticError, type(None)]
    assert all(request.tokens == [7] * 50 + [1] for request in requests if request.fault is None)


def test_one_whose_reader_lags_holds_up_nobody(serving, ask):
    class Lagging(Recorder):
        lags = True

        def stalled(self):
            return self.lags

    scheduler = serving(slots=2)
    lagging = Lagging([5], b"")
    scheduler.submit(lagging)
    assert ask(scheduler, [6]).tokens == [7, 8, 1] and lagging.tokens == []
    lagging.lags = False
    assert lagging.finished.wait(60) and lagging.tokens == [7, 8, 1]


# ---- prompts

def test_a_prompt_beside_a_stream_is_computed_a_quantum_at_a_time(hold, ask):
    scheduler = hold(chunk=256)
    second = ask(scheduler, LONG, wait=False)
    scheduler.gate.opened.set()
    assert second.finished.wait(60) and second.progress == [128, 256, 384, 400]


def test_alone_it_is_computed_a_chunk_at_a_time(serving, ask):
    assert ask(serving(slots=4, chunk=256), LONG).progress == [256, 400]


def test_two_prompts_take_turns(serving, monkeypatch):
    monkeypatch.setattr("ds4mlx.service.scheduler.TURN_TOKENS", 256)
    order, gate = [], Gate()

    class Noting(Recorder):
        def prefilled(self, tokens):
            order.append(self.wanted.ids[0])

    scheduler = serving(slots=2, chunk=128)
    scheduler.stub.before_prefill = gate
    requests = [Noting([n] * 600, bytes([n])) for n in (5, 6)]
    for request in requests:
        scheduler.submit(request)
    gate.opened.set()
    assert all(request.finished.wait(60) for request in requests)
    turns = [(n, len(list(slices))) for n, slices in itertools.groupby(order)]
    assert turns == [(5, 2), (6, 2), (5, 2), (6, 2), (5, 1), (6, 1)]


def test_prompts_that_begin_alike_compute_their_beginning_once(serving, ask):
    scheduler, gate = serving(slots=4, chunk=256), Gate()
    scheduler.stub.before_prefill = gate
    requests = [ask(scheduler, [*range(2, 1502), n], wait=False, anchor=1500) for n in range(2, 6)]
    gate.opened.set()
    assert all(request.finished.wait(60) for request in requests)
    assert [request.reused for request in requests] == [0, 1500, 1500, 1500] and sum(scheduler.stub.slices) == 1504


def test_who_follows_one_that_leaves_computes_the_beginning_itself(serving, ask):
    scheduler, gate = serving(slots=4, chunk=256), Gate()
    scheduler.stub.before_prefill = gate
    first, second = (ask(scheduler, [*range(2, 1502), n], wait=False, anchor=1500) for n in (2, 3))
    assert gate.reached.wait(60)
    scheduler.cancel(first, "cancelled")
    gate.opened.set()
    assert second.finished.wait(60) and second.fault is None and second.reused == 256 and second.donor == 0


def test_of_those_who_follow_one_that_leaves_the_first_leads_the_others(serving, ask):
    scheduler, gate = serving(slots=4, chunk=256), Gate()
    scheduler.stub.before_prefill = gate
    first, *others = (ask(scheduler, [*range(2, 1502), n], wait=False, anchor=1500) for n in range(2, 6))
    assert gate.reached.wait(60)
    scheduler.cancel(first, "cancelled")
    gate.opened.set()
    assert all(request.finished.wait(60) and request.fault is None for request in others)
    assert [request.reused for request in others] == [256, 1500, 1500]


# ---- the end of an answer

def test_who_comes_back_at_once_finds_its_answer_kept(serving):
    class Chatty(Recorder):
        """Sends its next turn in the moment that it has its answer."""

        def ending(self):
            return Ending((EOS,))

        def finish(self, fault=None):
            if self.turns:
                ids = [*self.wanted.ids, *self.tokens, 9]
                self.next = Chatty(ids, bytes(len(ids)))
                self.next.turns = self.turns - 1
                scheduler.submit(self.next)
            super().finish(fault)

    scheduler, gate = serving(lambda prompt: [7] * (10 - prompt[0]), slots=4), Gate()
    requests = [Chatty([n, n], bytes([n])) for n in (2, 3, 4)]      # each one step later, they end in the same
    scheduler.stub.before_prefill = gate
    for request in requests:
        request.turns = 5
        scheduler.submit(request)
    gate.opened.set()
    for _, number in itertools.product(range(5), range(3)):
        request = requests[number]
        assert request.finished.wait(60)
        length, requests[number] = len(request.wanted.ids) + len(request.tokens), request.next
        assert request.next.finished.wait(60)
        assert (request.next.source, request.next.reused) == ("memory-token", length)


# ---- places, cancellation, shutdown

def test_each_that_waits_knows_its_place(hold, ask):
    scheduler = hold(4)
    waiting = [ask(scheduler, [100 + n], wait=False) for n in range(3)]
    assert [scheduler.place(request) for request in (*scheduler.held, *waiting)] == [0, 0, 0, 0, 1, 2, 3]
    scheduler.cancel(waiting[0], "cancelled")
    assert [scheduler.place(request) for request in waiting] == [0, 1, 2]
    scheduler.gate.opened.set()


def test_only_requests_that_wait_count_against_the_queue(hold, ask):
    scheduler = hold(4, max_queue=1)
    waiting = ask(scheduler, [100], wait=False)
    with pytest.raises(BadRequest, match="1 requests are waiting"):
        ask(scheduler, [101], wait=False)
    scheduler.gate.opened.set()
    assert waiting.finished.wait(60) and waiting.fault is None


def test_at_shutdown_all_that_run_may_end(hold):
    scheduler = hold(4, tokens=50)
    closing = threading.Thread(target=scheduler.close, args=(10,))
    closing.start()
    scheduler.gate.opened.set()
    closing.join()
    assert [(request.fault, len(request.tokens)) for request in scheduler.held] == [(None, 51)] * 4


def test_what_outlasts_the_drain_time_is_given_up_in_all_slots(hold):
    scheduler = hold(4, tokens=4000)
    closing = threading.Thread(target=scheduler.close, args=(0,))
    closing.start()
    while not all(request.why for request in scheduler.held):
        closing.join(0.01)
    scheduler.gate.opened.set()
    closing.join()
    assert all(isinstance(request.fault, Cancelled) for request in scheduler.held)


def test_a_session_that_cannot_be_opened_costs_its_request(serving, ask):
    class Full(Exception):
        pass

    scheduler = serving(slots=2)
    opening, scheduler.stub.open = scheduler.stub.open, lambda context: (_ for _ in ()).throw(Full())
    scheduler.slots[0] = scheduler.slots[1] = None      # as after a failure of the engine
    assert isinstance(ask(scheduler, [2, 3]).fault, Full)
    scheduler.stub.open = opening
    assert ask(scheduler, [2, 3]).tokens == [7, 8, 1]


# ---- an engine thread that hangs, or has ended

def test_a_thread_that_hangs_is_told_once_and_nobody_waits_for_it(hold, ask, monkeypatch, caplog):
    scheduler = hold(4)
    waiting = ask(scheduler, [100], wait=False)
    monkeypatch.setattr("ds4mlx.service.scheduler.STUCK_S", 0.0)
    for _ in range(2):
        scheduler._watchdog.look()
    assert waiting.finished.wait(60) and waiting.fault.code == "failed"
    with pytest.raises(BadRequest, match="restart"):
        ask(scheduler, [101], wait=False)
    told, = [record.getMessage() for record in caplog.records if record.name.endswith("watchdog")]
    assert "restart the server" in told and "before_decode" in told
    scheduler.gate.opened.set()
    assert all(request.finished.wait(60) for request in scheduler.held)


def test_a_thread_that_hung_and_goes_on_is_taken_back(hold, ask, monkeypatch):
    scheduler = hold()
    monkeypatch.setattr("ds4mlx.service.scheduler.STUCK_S", 0.0)
    assert scheduler.state == "failed"
    monkeypatch.undo()
    scheduler.gate.opened.set()
    assert ask(scheduler, [100, 101]).fault is None and scheduler.state == "ok"


def test_when_the_thread_ends_everybody_is_told(serving, ask):
    scheduler, gate = serving(slots=2), Gate()
    scheduler.stub.before_decode = gate
    requests = [ask(scheduler, [2 + n], wait=False) for n in range(4)]
    assert gate.reached.wait(60)
    scheduler.power = 0             # a defect: the sleep after a step divides by it
    gate.opened.set()
    assert all(request.finished.wait(60) and request.fault for request in requests)
    while scheduler._thread.is_alive():
        pass
    assert scheduler.state == "failed" and scheduler.active == scheduler.queued == 0
