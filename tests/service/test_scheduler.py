"""One engine thread, many requests: order, reuse of the live session, cancellation, failures, shutdown."""
import threading

import pytest

from ds4mlx.engine.stub import Gate, StubEngine
from ds4mlx.errors import BadRequest, Cancelled
from ds4mlx.service.scheduler import Scheduler


LONG = list(range(2, 102))   # fewer than 64 tokens are not worth going back for


def test_an_answer_ends_at_the_token_that_completes_it(serving, ask):
    request = ask(serving(), [2, 3])
    assert request.tokens == [7, 8, 1] and request.fault is None


def test_an_answer_ends_at_its_token_limit(serving, ask):
    assert ask(serving(), [2, 3], max_tokens=1).tokens == [7]
    assert ask(serving(), [2, 3], max_tokens=0).tokens == []


def test_prefill_goes_in_slices_that_end_at_multiples_of_the_chunk(serving, ask):
    scheduler = serving(chunk=128)
    assert ask(scheduler, list(range(2, 302))).progress == [128, 256, 300]
    scheduler.stub.slices.clear()
    ask(scheduler, [*range(2, 302), 7, 8, *range(2, 102)])  # 302 tokens are there: 82 to the next multiple
    assert scheduler.stub.slices == [82, 18]


def test_the_next_turn_continues_the_live_session(serving, ask):
    scheduler = serving()
    ask(scheduler, [2, 3])
    turn = ask(scheduler, [2, 3, 7, 8, 1, 4])
    assert (turn.source, turn.reused) == ("memory-token", 4)


def test_another_answer_to_the_same_prompt_computes_no_prompt(serving, ask):
    scheduler = serving()
    first = ask(scheduler, LONG)
    scheduler.stub.slices.clear()
    again = ask(scheduler, LONG)
    assert (again.source, again.reused, again.tokens) == ("memory-rewind", len(LONG), first.tokens)
    assert scheduler.stub.slices == []


def test_a_turn_whose_header_differs_goes_on_from_the_anchor_before_it(serving, ask):
    scheduler = serving(chunk=128)
    first = ask(scheduler, [*range(2, 302), 400, 401], anchor=300)
    assert first.progress == [128, 256, 300, 302]
    turn = ask(scheduler, [*range(2, 302), 400, 402, 7, 8])  # as when the reasoning is left out of the history
    assert (turn.source, turn.reused) == ("memory-rewind", 300)


def test_a_prompt_that_differs_goes_back_to_where_the_engine_can(serving, ask):
    scheduler = serving()
    ask(scheduler, [2, 3, 4])
    turn = ask(scheduler, [2, 3, 5])  # the stub rewinds to marks only, and the only mark is behind the difference
    assert (turn.source, turn.reused) == ("none", 0)


def test_requests_are_served_in_the_order_they_came(serving, ask):
    gate, served = Gate(), []
    scheduler = serving(script=lambda prompt: served.append(prompt[0]) or [7])
    scheduler.stub.before_prefill = gate
    requests = [ask(scheduler, [n], wait=False) for n in range(2, 7)]
    gate.opened.set()
    assert all(request.finished.wait(60) for request in requests)
    assert served[1:] == [2, 3, 4, 5, 6]  # the first is the warm-up's


def test_a_cancelled_prefill_keeps_what_was_computed(serving, ask):
    scheduler, gate = serving(chunk=128), Gate()
    scheduler.stub.before_prefill = gate
    request = ask(scheduler, list(range(2, 302)), wait=False)
    assert gate.reached.wait(60)
    scheduler.cancel(request, "cancelled")
    gate.opened.set()
    assert request.finished.wait(60) and isinstance(request.fault, Cancelled) and request.progress == [128]
    assert ask(scheduler, list(range(2, 302))).reused == 128


def test_a_cancelled_decode_keeps_the_prompt_for_another_try(serving, ask):
    scheduler, gate = serving(script=lambda prompt: [7] * 1000), Gate()
    scheduler.stub.before_decode = gate
    request = ask(scheduler, list(range(2, 202)), wait=False)
    assert gate.reached.wait(60)
    scheduler.cancel(request, "cancelled")
    gate.opened.set()
    assert request.finished.wait(60) and len(request.tokens) <= 1
    assert ask(scheduler, list(range(2, 202)), max_tokens=1).reused == 200


def test_a_cancelled_request_leaves_the_queue_at_once(serving, ask):
    scheduler, gate = serving(), Gate()
    scheduler.stub.before_prefill = gate
    active, queued = ask(scheduler, [2], wait=False), ask(scheduler, [3], wait=False)
    assert gate.reached.wait(60)
    scheduler.cancel(queued, "cancelled")
    assert isinstance(queued.fault, Cancelled) and scheduler.queued == 0
    gate.opened.set()
    assert active.finished.wait(60) and active.fault is None


def test_a_full_queue_is_refused_with_429(serving, ask):
    scheduler, gate = serving(max_queue=2), Gate()
    scheduler.stub.before_prefill = gate
    admitted = [ask(scheduler, [2], wait=False) for _ in range(3)]  # one runs, two wait
    for _ in range(1000):
        with pytest.raises(BadRequest) as refused:
            ask(scheduler, [2], wait=False)
    assert (refused.value.status, refused.value.code, scheduler.queued + scheduler.active) == (429, "queue_full", 3)
    gate.opened.set()
    assert all(request.finished.wait(60) for request in admitted)


def test_a_failing_step_costs_one_request_and_a_fresh_session(serving, ask):
    scheduler = serving()
    ask(scheduler, [2, 3])

    def fail():
        scheduler.stub.before_decode = None
        raise ArithmeticError("logits are not finite")

    scheduler.stub.before_decode = fail
    assert isinstance(ask(scheduler, [2, 3]).fault, ArithmeticError)
    after = ask(scheduler, [2, 3])
    assert (after.fault, after.reused, after.tokens) == (None, 0, [7, 8, 1])


def test_an_engine_that_cannot_open_says_why(v4_tokenizer):
    def no_engine():
        raise MemoryError("80 GiB needed")

    scheduler = Scheduler(no_engine, v4_tokenizer, context=4096)
    with pytest.raises(MemoryError, match="80 GiB"):
        scheduler.start()
    assert scheduler.state == "failed"
    scheduler.close(0)


def test_who_is_closed_while_the_engine_opens_leaves_no_thread(v4_tokenizer):
    gate = Gate()
    scheduler = Scheduler(lambda: gate() or StubEngine(), v4_tokenizer, context=4096)
    starting, closing = (threading.Thread(target=work) for work in (scheduler.start, lambda: scheduler.close(0)))
    starting.start()
    assert gate.reached.wait(60)
    closing.start()
    while scheduler.state != "closed":
        pass
    gate.opened.set()
    scheduler._thread.join(60)
    assert not scheduler._thread.is_alive() and scheduler.state == "closed"
    starting.join()
    closing.join()


def test_an_engine_without_progress_for_too_long_counts_as_failed(serving, ask, monkeypatch):
    scheduler, gate = serving(), Gate()
    scheduler.stub.before_decode = gate
    request = ask(scheduler, [2], wait=False)
    assert gate.reached.wait(60) and scheduler.state == "ok"
    monkeypatch.setattr("ds4mlx.service.scheduler.STUCK_S", 0.0)
    assert scheduler.state == "failed"
    gate.opened.set()
    assert request.finished.wait(60) and request.fault is None


def test_shutdown_refuses_the_queued_and_lets_the_active_finish(serving, ask):
    scheduler, gate = serving(), Gate()
    scheduler.stub.before_decode = gate
    active, queued = ask(scheduler, [2], wait=False), ask(scheduler, [3], wait=False)
    assert gate.reached.wait(60)
    closing = threading.Thread(target=scheduler.close, args=(10,))
    closing.start()
    assert queued.finished.wait(60) and queued.fault.code == "shutting_down"
    with pytest.raises(BadRequest, match="shutting down"):
        ask(scheduler, [4], wait=False)
    gate.opened.set()
    closing.join()
    assert active.fault is None and active.tokens == [7, 8, 1]


def test_shutdown_cancels_what_outlasts_the_drain_time(serving, ask):
    scheduler, gate = serving(script=lambda prompt: [7] * 10_000), Gate()
    scheduler.stub.before_decode = gate
    active = ask(scheduler, [2], max_tokens=10_000, wait=False)
    assert gate.reached.wait(60)
    closing = threading.Thread(target=scheduler.close, args=(0,))
    closing.start()
    while active.why is None:
        closing.join(0.01)
    gate.opened.set()
    closing.join()
    assert isinstance(active.fault, Cancelled) and active.why == "shutting_down"
