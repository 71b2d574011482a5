"""A scheduler over the stub engine, and requests for it."""
import pytest
from host import Host
from recorder import Recorder

from ds4mlx.engine.stub import StubEngine
from ds4mlx.service.scheduler import Scheduler


@pytest.fixture
def serving(v4_tokenizer):
    """serving(script, chunk=, slots=, max_queue=, **stub): a running Scheduler; its stub engine is `.stub`."""
    running = []

    def start(script=lambda prompt: [7, 8], *, chunk=128, slots=1, max_queue=0,
              open_store=lambda engine, context: None, **stub):
        def open_engine():
            scheduler.stub = StubEngine(script, **stub)
            return scheduler.stub

        scheduler = Scheduler(open_engine, v4_tokenizer, context=4096, slots=slots, prefill_chunk=chunk,
                              max_queue=max_queue, open_store=open_store)
        scheduler.start()
        scheduler.stub.slices.clear()  # the warm-up's
        running.append(scheduler)
        return scheduler

    yield start
    for scheduler in running:
        scheduler.close(drain_seconds=10)
        assert scheduler.state == "closed"


@pytest.fixture
def ask(v4_tokenizer):
    """ask(scheduler, prompt): submit, wait, return the Recorder. `wait=False` leaves it running."""
    def submit(scheduler, prompt, *, wait=True, **request):
        recorder = Recorder(prompt, v4_tokenizer.key_bytes_of_ids(prompt), **request)
        scheduler.submit(recorder)
        if wait:
            assert recorder.finished.wait(60)
        return recorder

    return submit


@pytest.fixture
def host():
    """host(answers, **settings): a running Host."""
    hosts = []
    yield lambda *args, **settings: hosts.append(Host(*args, **settings)) or hosts[-1]
    for running in hosts:
        running.stop()
