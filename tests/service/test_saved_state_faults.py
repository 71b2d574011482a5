"""What goes wrong with states on disk costs a prefill at most: no request fails, and nothing wrong is computed with."""
import errno
import logging
import shutil

import numpy as np
import pytest
from host import Host, system, talk, user

from ds4mlx.engine.stub import StubEngine
from ds4mlx.errors import CheckpointError

ANSWERS = ["Plan.</think>First answer.", "Plan.</think>Second answer.", "Plan.</think>Third answer."]
QUESTION = (system("You help with long things. " * 60), user("What about it? " * 40))
SECRET = "xyzzy-plugh"


@pytest.fixture
def kept(host, tmp_path):
    """kept(engine): a Host that was restarted after one turn, and the request that follows that turn."""
    def start(engine=StubEngine, **settings):
        running = host(ANSWERS, engine=engine, kv_disk_dir=tmp_path / "kv", **settings)
        message = running.ask(talk(*QUESTION)).message
        running.restart()
        return running, talk(*QUESTION, message, user("And then?"))

    return start


def failing(times, fault=RuntimeError("the device gave up")):
    """A hook of the engine that fails so many times, then lets pass."""
    left = [fault] * times

    def hook():
        if left:
            raise left.pop()

    return hook


def quarantined(running):
    return running.store.stats().quarantined


def answered(reply, text="Second answer."):
    return reply.end.reason == "stop" and reply.message.parts[-1].text == text


# ---- a restored state that cannot be computed with

@pytest.mark.parametrize("phase", ["before_prefill", "before_decode"])
def test_a_restored_state_that_fails_is_set_aside_and_the_client_sees_nothing(kept, phase):
    running, request = kept()
    setattr(running.engine, phase, failing(1))
    reply = running.ask(request)
    assert answered(reply) and quarantined(running) == 1
    again = running.ask(request)   # nothing fails any more
    assert answered(again) and quarantined(running) == 1


def test_the_next_state_serves_when_the_best_one_fails(kept):
    running, request = kept()
    anchor = running.prompt(request) - running.tail(request, 1)   # the system text was saved by itself
    running.engine.before_prefill = failing(1)
    reply = running.ask(request)
    assert answered(reply) and (reply.source, reply.reused) == ("disk-text", anchor)


def test_two_states_that_fail_leave_a_cold_start(kept):
    running, request = kept()
    running.engine.before_prefill = failing(2)
    reply = running.ask(request)
    assert answered(reply) and (reply.source, reply.reused) == ("none", 0) and quarantined(running) == 2


def test_an_engine_that_always_fails_is_not_blamed_on_all_states(kept):
    running, request = kept()
    running.engine.before_prefill = failing(3)
    assert running.ask(request).end.error_code == "internal_error" and quarantined(running) == 2


class NotFinite(StubEngine):
    """Its logits are no numbers until it opens another session."""
    bad = False

    def open(self, context):
        self.bad = False
        return super().open(context)

    def _logits(self, session):
        return super()._logits(session) * (np.float32("nan") if self.bad else 1)


def test_first_logits_that_are_no_numbers_count_as_a_failed_state(kept):
    running, request = kept(NotFinite)
    running.engine.bad = True
    reply = running.ask(request)
    assert answered(reply) and quarantined(running) == 1


class Refusing(StubEngine):
    """Its sessions fail to take the first state they are given."""

    def open(self, context):
        session = super().open(context)
        restore, fail = session.restore, failing(1, self.fault)
        session.restore = lambda arrays: fail() or restore(arrays)
        return session


@pytest.mark.parametrize("fault", [CheckpointError("not the shape"), RuntimeError("out of memory"), MemoryError()])
def test_a_state_that_the_engine_does_not_take_costs_a_prefill(kept, fault):
    Refusing.fault = fault
    running, request = kept(Refusing)
    assert answered(running.ask(request)) and quarantined(running) >= 1


def test_a_fault_after_the_first_token_is_reported(kept):
    running, request = kept()
    steps = []

    def second():
        steps.append(0)
        if len(steps) == 2:
            raise RuntimeError("the device gave up")

    running.engine.before_decode = second
    assert running.ask(request).end.error_code == "internal_error" and quarantined(running) == 0


# ---- a disk that fails

@pytest.mark.parametrize("step", ["create", "write", "fsync", "rename", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_serving_costs_no_request(host, tmp_path, step, code):
    running = host(ANSWERS, kv_disk_dir=tmp_path / "kv")

    def fail(now):
        if now == step:
            raise OSError(code, "the disk failed")

    running.store._directory.before = fail
    first = running.ask(talk(*QUESTION))
    second = running.ask(talk(*QUESTION, first.message, user("And then?")))
    assert answered(first, "First answer.") and answered(second) and second.reused == first.state
    assert running.store.stats().saved == 0 and running.store.stats().paused == (code == errno.ENOSPC)


def test_a_directory_that_vanishes_while_serving_costs_no_request(host, tmp_path):
    running = host(ANSWERS, kv_disk_dir=tmp_path / "kv")
    first = running.ask(talk(*QUESTION))
    shutil.rmtree(tmp_path / "kv")
    other = running.ask(talk(user("Something else. " * 60)))
    again = running.ask(talk(*QUESTION, first.message, user("And then?")))
    assert answered(other, "First answer.") and answered(again) and again.source == "none"


def test_a_state_that_cannot_be_exported_costs_no_request(host, tmp_path, caplog):
    running = host(ANSWERS, kv_disk_dir=tmp_path / "kv")
    running.service.scheduler.slots[0].session.snapshot = lambda: failing(1)()
    assert answered(running.ask(talk(*QUESTION)), "First answer.") and running.store.stats().saved == 0
    assert "because of a defect" in caplog.text


@pytest.mark.parametrize("make", [lambda path: path.write_text("a file"), lambda path: path.mkdir(mode=0o777)
                                  or path.chmod(0o777), lambda path: path.symlink_to("/nowhere/at/all")])
def test_an_unusable_directory_is_refused_at_the_start_in_one_sentence(tmp_path, make):
    make(tmp_path / "kv")
    with pytest.raises(CheckpointError) as refused:
        Host(ANSWERS, engine=pytest.fail, kv_disk_dir=tmp_path / "kv")   # which takes minutes, is not called
    told = str(refused.value)
    assert str(tmp_path / "kv") in told and "\n" not in told and ";" in told


# ---- nothing leaks

def test_no_log_holds_what_was_said(kept, caplog):
    with caplog.at_level(logging.DEBUG):
        running, request = kept()
        running.engine.before_prefill = failing(1)
        reply = running.ask(talk(*request.messages[:-1], user(SECRET)))
        running.ask(talk(system(SECRET * 200), user("Hi")))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert reply.line and SECRET not in said + reply.line and "What about it" not in said and "answer" not in said
