"""Sessions of the small random model that decode together, and what each says alone."""
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from small_model import CONFIG, small_model

from ds4mlx.engine.mlx_decode import Decoder
from ds4mlx.engine.mlx_session import MLXSession
from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.models.deepseek_v4.state import Pools

# Where windows, groups of 4 and of 128, the choice of 8 rows of ratio 4, and pages begin and end, within a few steps.
LENGTHS = (1, 2, 3, 7, 13, 15, 16, 30, 34, 77, 122, 125, 127, 128, 250, 2043)
GREEDY = Sampling(temperature=0.0)


@dataclass
class Bench:
    """Sessions of one model, over common pages."""
    model: object
    decoder: Decoder
    pools: Pools
    known: dict = field(default_factory=dict)
    sessions: WeakSet = field(default_factory=WeakSet)

    def open(self, context=4096):
        session = MLXSession(self.model, context, pools=self.pools, others=self.sessions)
        self.sessions.add(session)
        return session

    def prefilled(self, tokens):
        session = self.open()
        for at in range(0, len(tokens), 2048):
            session.feed(tokens[at:at + 2048])
        session.mark()
        return session

    def base(self, length):
        """A session of so many tokens, that nobody is to change: to branch from."""
        if length not in self.known:
            tokens = [(5 * length + 7 * i + i * i) % CONFIG.vocab_size for i in range(length)]
            self.known[length] = self.prefilled(tokens)
        return self.known[length]

    def branch(self, length):
        session = self.open()
        assert session.branch(self.base(length), length) == length
        return session

    def alone(self, length, count, sampling=GREEDY, mask=None):
        """The `count` tokens that follow, and the logits after the last but one, which is in the session."""
        key = length, count, repr(sampling), None if mask is None else mask.tobytes()
        if key not in self.known:
            talk = Talk(self.branch(length), sampling, mask)
            for _ in range(count):
                self.step([talk])
            self.known[key] = talk.said, talk.session.logits()
        return self.known[key]

    def step(self, talks):
        """One step of all of them, in this order."""
        steps = self.decoder.decode([talk.row() for talk in talks])
        for talk, step in zip(talks, steps, strict=True):
            talk.said.append(step.token)
        return steps


@dataclass(eq=False)
class Talk:
    """A session that decodes, and what it has said."""
    session: MLXSession
    sampling: Sampling = GREEDY
    mask: object = None
    said: list = field(default_factory=list)

    def row(self, **changes):
        row = Row(self.session, self.sampling, self.said[-1] if self.said else None, tuple(self.said), self.mask)
        return replace(row, **changes)


def bench(rounding="none", lookahead=False):
    model, pools = small_model(rounding), Pools(CONFIG, rounding)
    return Bench(model, Decoder(model, pools, lookahead), pools)
