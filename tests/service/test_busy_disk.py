"""States on their way to disk and back hold up nobody who decodes, and lose nothing by what happens meanwhile."""
import time

import pytest
from host import system, talk, user, without_reasoning

from ds4mlx.engine.stub import Gate, StubEngine

LONG = "What about this line of text? " * 60
STREAM = "Plan.</think>" + "word " * 400
ANSWERS = ["Plan.</think>First answer.", "Plan.</think>Second answer."]


class Streaming(StubEngine):
    """Answers a short prompt at length."""
    stream = ()

    def __init__(self, script, **options):
        super().__init__(lambda prompt: self.stream if len(prompt) < 300 else script(prompt), **options)


@pytest.fixture
def running(host, tmp_path):
    """A Host of two slots that has a long conversation on disk alone; `.first` is its answer."""
    begun = host(ANSWERS, engine=Streaming, batched_session=2, kv_disk_dir=tmp_path / "kv")
    first = begun.ask(talk(user(LONG)))
    begun.restart()
    begun.first = first
    begun.engine.stream = begun.tokenizer.encode_marked(STREAM)
    return begun


def hold_reading(running):
    """A Gate that the reading of states waits at."""
    gate, opened = Gate(), running.store._directory.open
    running.store._directory.open = lambda name: gate() or opened(name)
    return gate


def test_others_decode_while_a_state_is_read(running):
    gate = hold_reading(running)
    second = running.begin(talk(user(LONG), running.first.message, user("And then?")))
    assert gate.reached.wait(60)
    answer, = running.service._answers()
    stream = running.end(running.begin(talk(user("Hi"))), settle=False)
    assert stream.end.reason == "stop" and answer is second and not second.began
    gate.opened.set()
    assert (reply := running.end(second)).source == "disk-text" and reply.reused == running.first.state


def test_who_comes_back_from_disk_waits_for_no_prompt_that_begins_alike(host, tmp_path):
    running = host(ANSWERS, batched_session=2, kv_disk_dir=tmp_path / "kv", kv_cache_cold_max_tokens=0,
                   prefill_chunk=128)
    first, shared = running.ask(talk(system(LONG), user("A task. " * 200))), len(LONG)
    running.restart()
    running.engine.before_prefill, computed, load = Gate(), [], running.store.start_loading
    running.store.start_loading = lambda *file: computed.append(sum(running.slices)) or load(*file)
    other = running.begin(talk(system(LONG), user("Another task. " * 200)))
    assert running.engine.before_prefill.reached.wait(60)
    second = running.begin(talk(system(LONG), user("A task. " * 200), first.message, user("Go on.")))
    running.engine.before_prefill.opened.set()
    running.end(other, settle=False)
    assert running.end(second).reused == first.state and computed[0] < shared


def test_who_leaves_while_its_state_is_read_leaves_the_slot_as_it_was(running):
    held = running.ask(talk(user("Another one. " * 60)))
    gate = hold_reading(running)
    second = running.begin(talk(user(LONG), running.first.message, user("And then?")))
    assert gate.reached.wait(60)
    running.service.scheduler.cancel(second, "cancelled")
    assert running.end(second, settle=False).end.reason == "cancelled"
    gate.opened.set()
    running.settle()
    assert running.ask(talk(user("Another one. " * 60))).reused >= held.prompt - 2


def test_who_leaves_once_its_state_is_there_leaves_no_key_of_the_state_before(host, tmp_path):
    """Two states of one length: with the keys of the other, a state would be taken for it."""
    running, gate = host(["Plan.</think>Yes."], kv_disk_dir=tmp_path / "kv"), Gate()
    one, two = (talk(user(name * 700)) for name in "AB")
    said = [running.ask(conversation) for conversation in (one, two)]
    assert said[0].state == said[1].state
    alike, running.store.alike = running.store.alike, lambda key: gate() or {}
    leaving = running.begin(talk(*one.messages, said[0].message, user("C" * 700)))
    assert gate.reached.wait(60)
    running.service.scheduler.cancel(leaving, "cancelled")
    running.end(leaving)
    gate.opened.set()
    running.store.alike = alike
    running.ask(talk(*two.messages, without_reasoning(said[1].message), user("D")))
    assert "B" * 700 in running.tokenizer.decode(running.tokens)


def test_others_decode_while_a_state_that_gives_way_waits_for_the_writer(host, tmp_path):
    running = host(ANSWERS, engine=Streaming, batched_session=2, kv_disk_dir=tmp_path / "kv",
                   kv_cache_cold_max_tokens=0)
    running.engine.stream = running.tokenizer.encode_marked(STREAM)
    gate, texts = Gate(), [f"{name} {LONG}" for name in "ABC"]
    for text in texts[:2]:
        running.ask(talk(user(text)))
    running.store._directory.before = lambda step: gate()
    replies = [running.ask(talk(user(text)), settle=False) for text in reversed(texts)]
    assert gate.reached.wait(60)
    stream = running.end(running.begin(talk(user("Hi"))), settle=False)
    assert stream.end.reason == "stop" and all(reply.end.reason == "stop" for reply in replies)
    gate.opened.set()


def test_a_state_that_gives_way_waits_for_a_writer_that_is_busy(host, tmp_path):
    running = host(ANSWERS, batched_session=2, kv_disk_dir=tmp_path / "kv", kv_cache_cold_max_tokens=0)
    gate, texts = Gate(), [f"{name} {LONG}" for name in "ABCDE"]
    for text in texts[:2]:
        running.ask(talk(user(text)))
    running.store._directory.before = lambda step: gate()
    for text in texts[2:4]:
        running.ask(talk(user(text)), settle=False)     # one save is under way, the next one waits
    last = running.begin(talk(user(texts[4])))
    deadline = time.monotonic() + 60
    while not any(slot.saving for slot in running.service.scheduler.slots) and time.monotonic() < deadline:
        pass
    gate.opened.set()
    running.end(last)
    assert running.store.stats().saved == 3


def test_what_is_saved_for_a_request_and_at_the_end_is_in_the_trace(host, tmp_path):
    import json

    from ds4mlx.service.trace import Trace
    running = host(ANSWERS, batched_session=2, kv_disk_dir=tmp_path / "kv", kv_cache_cold_max_tokens=0)
    running.service.trace = Trace(tmp_path / "trace", "jsonl")
    states = [running.ask(talk(system(name * 700), user("Hi"))).state for name in "ABC"]
    running.stop()
    records = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    events = [(r["request"], r["event"]) for r in records if r["type"] == "event"]
    assert events == [(3, f"stored checkpoint reason=evict tokens={states[0]}"),
                      (0, f"stored checkpoint reason=shutdown tokens={states[2]} slot=0"),
                      (0, f"stored checkpoint reason=shutdown tokens={states[1]} slot=1")]
    assert [r["type"] for r in records if r["request"] == 3][:3] == ["request", "cache", "event"]
