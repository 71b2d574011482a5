"""Sessions that branch, go back, prefill, decode, fail, are saved and restored in any order: each has the state of its
tokens, and every page is counted."""
from collections import Counter

import numpy as np
import pytest
from small_model import CONFIG
from state import whole
from talks import GREEDY, bench

from ds4mlx import ops
from ds4mlx.engine.protocol import Row
from ds4mlx.errors import CheckpointError

LIMIT = 2e-5    # as for rows that decode together
STARTS = (2046, 125, 0)
CONTEXT = 2070  # the ends of a page, of groups of 128 and of the context are within a few steps of the starts


class Play:
    """Four sessions, and random things done to them. `apart` is a bench that computes what they should be."""

    def __init__(self, bench, apart, seed):
        self.bench, self.apart, self.rng = bench, apart, np.random.default_rng(seed)
        self.sessions = [bench.open(CONTEXT) for _ in range(4)]
        self.sampled = {}       # by session: the last token, and the length that it follows
        self.snapshots = []     # with the session, and its tokens and epoch then

    def any(self):
        return self.sessions[self.rng.integers(len(self.sessions))]

    def tokens(self, session, most):
        count = min(self.rng.integers(1, most + 1), CONTEXT - len(session.tokens))
        return self.rng.integers(0, CONFIG.vocab_size, count).tolist()

    def begin(self):
        length = int(self.rng.choice(STARTS))
        assert self.any().branch(self.bench.base(length), length) == length

    def branch(self):
        other = self.any()
        self.any().branch(other, len(other.tokens) + 2 - int(self.rng.integers(12)))

    def rewind(self):
        session = self.any()
        session.rewind(len(session.tokens) - int(self.rng.integers(10)))

    def prefill(self):
        session = self.any()
        if tokens := self.tokens(session, 40):
            session.feed(tokens)

    def decode(self):
        some = self.rng.permutation(len(self.sessions))[:self.rng.integers(1, len(self.sessions) + 1)]
        rows = [self.row(session) for session in (self.sessions[i] for i in some) if len(session.tokens) < CONTEXT]
        for row, step in zip(rows, self.bench.decoder.decode(rows), strict=True):
            self.sampled[row.session] = step.token, len(row.session.tokens)

    def row(self, session):
        """The token that it sampled, mostly; now and then another one, or none."""
        token, at = self.sampled.get(session, (None, None))
        if token is None or at != len(session.tokens) or self.rng.random() < 0.2:
            token, = self.tokens(session, 1)
        return Row(session, GREEDY, token if not session.tokens or self.rng.random() < 0.9 else None)

    def fail(self):
        calls, before = iter(range(self.rng.integers(6))), [list(session.tokens) for session in self.sessions]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "expert_down", lambda *args, real=ops.expert_down, **rest:
                          next(calls) >= 0 and real(*args, **rest))
            try:
                self.rng.choice([self.decode, self.prefill])()
            except StopIteration:
                assert [session.tokens for session in self.sessions] == before

    def mark(self):
        self.any().mark()

    def reopen(self):
        i = self.rng.integers(len(self.sessions))
        self.sessions[i].close()
        self.sessions[i] = self.bench.open(CONTEXT)

    def snapshot(self):
        if (session := self.any()).tokens:
            self.snapshots.append((session.snapshot(), session, list(session.tokens), session.epoch))

    def read(self):
        snapshot, session, tokens, epoch = self.snapshots.pop() if self.snapshots else [None] * 4
        if session and session.epoch == epoch and session.tokens:
            self.agree(whole(session, snapshot=snapshot), tokens)
        elif session:
            with pytest.raises(CheckpointError):
                snapshot.head(0)

    def restore(self):
        if (session := self.any()).tokens:
            self.any().restore(whole(session))

    def play(self, count):
        acts = [self.begin, self.branch, self.prefill, self.reopen, self.snapshot, self.read, self.restore, self.fail,
                *[self.mark] * 4, *[self.rewind] * 2, *[self.decode] * 8]
        for act in self.rng.integers(len(acts), size=count):
            acts[act]()

    def agree(self, state, tokens):
        """`state` is what a prefill of these tokens leaves."""
        start = next(n for n in STARTS if n <= len(tokens) and tokens[:n] == self.apart.base(n).tokens)
        session = self.apart.branch(start)
        if tokens[start:]:
            session.feed(tokens[start:])
        for name, expected in whole(session).items():
            np.testing.assert_allclose(state[name], expected, atol=LIMIT, err_msg=name)
        session.close()

    def end(self):
        """All is as it should be, and nothing is left."""
        for session in self.sessions:
            if session.tokens:
                self.agree(whole(session), session.tokens)
        everybody = [*self.sessions, *map(self.bench.base, STARTS)]
        held = Counter(page for session in everybody for page in session.table.entries)
        assert held == {page: n for page, n in enumerate(self.bench.pools.pages._holders) if page and n}
        for session in self.sessions:
            session.close()


@pytest.fixture(scope="module")
def apart():
    return bench()


@pytest.fixture(scope="module", params=[False, True], ids=["", "ahead"])
def shared(request):
    """Sessions over common pages, without and with lookahead."""
    with ops.only("reference" if request.param else "auto"):
        yield bench(lookahead=request.param)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_done_each_session_has_the_state_of_its_tokens(seed, shared, apart):
    play = Play(shared, apart, seed)
    play.play(100)
    play.end()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_much_more_is_done(seed, shared, apart):
    play = Play(shared, apart, seed)
    play.play(200)
    play.end()
