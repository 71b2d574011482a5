"""The least that a Request can be: it records what it is told."""
import threading

from ds4mlx.engine.protocol import Sampling
from ds4mlx.errors import Cancelled
from ds4mlx.service.slot import Ending
from ds4mlx.sessions.lookup import Wanted


class Recorder:
    """Collects tokens, and stops at `eos`."""

    origins = hints = ()

    def __init__(self, prompt, key, max_tokens=100, eos=1, anchor=None):
        self.wanted, self.max_tokens, self.eos = Wanted(prompt, key), max_tokens, eos
        self.header_tokens = 0 if anchor is None else len(prompt) - anchor
        self.tokens, self.progress = [], []
        self.source = self.reused = self.donor = self.fault = self.why = None
        self.file = ""
        self.finished = threading.Event()

    def cancel(self, why):
        self.why = self.why or why

    def check(self):
        if self.why:
            raise Cancelled(self.why)

    def stalled(self):
        return False

    def after_key(self, key_bytes):
        raise AssertionError("these prompts are ids and share no text that is spelled in other ids")

    def starts(self, start):
        self.source, self.reused, self.file, self.donor = start.source, start.reused, start.file, start.donor

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
