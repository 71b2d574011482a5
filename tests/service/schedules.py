"""Random schedules of requests over the scripted engine: who joins when, goes on from whom, and leaves."""
import random
import threading

from recorder import Recorder

from ds4mlx.engine.stub import StubEngine
from ds4mlx.service.slot import Ending

VOCAB, EOS, QUANTUM = 512, 1, 128


def script(prompt):
    """An answer that depends on every token of the prompt: of a state that is not quite its own, it would be another
    one."""
    draw = random.Random(hash(tuple(prompt)))
    return [draw.randrange(2, VOCAB) for _ in range(draw.randrange(0, 24))]


def solo(prompt, max_tokens):
    """The answer to a prompt that is alone."""
    return [*script(prompt), EOS][:max_tokens]


class Counting(StubEngine):
    """gaps: the slices of prompts that were computed between two steps of a session, for each such pair; rows: of each
    step."""

    def __init__(self, **options):
        super().__init__(script, vocab=VOCAB, eos=EOS, **options)
        self._since, self.gaps, self.rows, self.opened = {}, [], [], []

    def open(self, context):
        self.opened.append(super().open(context))
        return self.opened[-1]

    def prefill(self, session, tokens):
        super().prefill(session, tokens)
        self._since = {other: [*slices, len(tokens)] for other, slices in self._since.items() if other is not session}

    def decode(self, rows):
        steps = super().decode(rows)
        assert len({id(row.session) for row in rows}) == len(rows)
        for row in rows:
            self.gaps.append(self._since.get(row.session, []) if row.generated else [])
            self._since[row.session] = []
        self.rows.append(len(rows))
        return steps


class Caller(Recorder):
    """Leaves after `leaves_after` tokens of its answer, or while it waits for the first with 0."""

    def __init__(self, prompt, key, *, leaves_after=None, **fields):
        super().__init__(prompt, key, **fields)
        self.leaves_after = leaves_after

    def ending(self):
        return Ending((EOS,) if self.tokens[-1:] == [EOS] else ())

    def accept(self, step):
        done = super().accept(step)
        if len(self.tokens) == self.leaves_after:
            self.cancel("cancelled")
        return done


def prompts(draw, count, known):
    """Some go on from one another or from known ones, some share a beginning, some are alone."""
    made = [*known]
    for _ in range(count):
        kind, before = draw.random(), draw.choice(made) if made else []
        if kind < 0.35 and before:
            prompt = [*before, *script(before), EOS]                # the next turn
        elif kind < 0.6 and before:
            prompt = before[:draw.randrange(1, len(before) + 1)]    # the same beginning
        else:
            prompt = []
        made.append([*prompt, *(draw.randrange(2, VOCAB) for _ in range(draw.choice((1, 3, 40, 130, 300))))][:3500])
    return made[len(known):]


def play(scheduler, draw, key_of, known=()):
    """Submits a random schedule in random moments. Returns the callers once all are done."""
    callers = []
    for prompt in prompts(draw, draw.randrange(2, 12), known):
        leaves = draw.choice((0, 1, 3)) if draw.random() < 0.2 else None
        caller = Caller(prompt, key_of(prompt), max_tokens=draw.choice((1, 5, 100)), leaves_after=leaves)
        scheduler.submit(caller)
        callers.append(caller)
        if leaves == 0:
            threading.Thread(target=scheduler.cancel, args=(caller, "cancelled")).start()
        if draw.random() < 0.3:
            draw.choice(callers).finished.wait(60)
    assert all(caller.finished.wait(60) for caller in callers)
    return callers
