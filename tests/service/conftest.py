"""A scheduler over the stub engine, and a request that records what it is told."""
import threading

import pytest
from host import Host

from ds4mlx.engine.protocol import Sampling
from ds4mlx.engine.stub import StubEngine
from ds4mlx.errors import Cancelled
from ds4mlx.service.scheduler import Scheduler
from ds4mlx.service.slot import Ending
from ds4mlx.sessions.lookup import Wanted


class Recorder:
    """The least a Request can be: collects tokens, stops at EOS 1."""

    origins = ()

    def __init__(self, prompt, key, max_tokens=100, eos=1, anchor=None):
        self.wanted, self.max_tokens, self.eos = Wanted(prompt, key), max_tokens, eos
        self.header_tokens = 0 if anchor is None else len(prompt) - anchor
        self.tokens, self.progress = [], []
        self.source = self.reused = self.fault = self.why = None
        self.finished = threading.Event()

    def cancel(self, why):
        self.why = self.why or why

    def check(self):
        if self.why:
            raise Cancelled(self.why)

    def after_key(self, key_bytes):
        raise AssertionError("these prompts are ids and share no text that is spelled in other ids")

    def starts(self, start):
        self.source, self.reused, self.file = start.source, start.reused, start.file

    def prefilled(self, tokens):
        self.progress.append(tokens)

    def sampling(self):
        return Sampling(temperature=0.0)

    def mask(self):
        return None

    def accept(self, step):
        self.tokens.append(step.token)
        return step.token == self.eos

    @property
    def began(self):
        return bool(self.tokens)

    def interruptible(self):
        return True

    def ending(self):
        return Ending()

    def blocks_in(self, tokens):
        return ()

    def saves(self, reason, tokens):
        pass

    def finish(self, fault=None):
        self.fault = fault
        self.finished.set()


@pytest.fixture
def serving(v4_tokenizer):
    """serving(script, chunk=, max_queue=, **stub): a running Scheduler; its stub engine is `.stub`."""
    running = []

    def start(script=lambda prompt: [7, 8], *, chunk=128, max_queue=0, open_store=lambda engine, context: None, **stub):
        def open_engine():
            scheduler.stub = StubEngine(script, **stub)
            return scheduler.stub

        scheduler = Scheduler(open_engine, v4_tokenizer, context=4096, prefill_chunk=chunk, max_queue=max_queue,
                              open_store=open_store)
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
            assert recorder.finished.wait(10)
        return recorder

    return submit


@pytest.fixture
def host():
    """host(answers, **settings): a running Host."""
    hosts = []
    yield lambda *args, **settings: hosts.append(Host(*args, **settings)) or hosts[-1]
    for running in hosts:
        running.stop()
