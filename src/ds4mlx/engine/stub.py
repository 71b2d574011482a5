"""A scripted engine without weights: what everything above the engine is tested on.

The next token follows a script: a function of the prompt giving the answer's ids, after which EOS comes. The logits are
a fixed noise in [0, 1) turned by the position, with SCRIPTED added at the scripted token. So an answer is the script,
whatever the temperature, until a bias, a ban or a mask removes its token; where the script says None, only the noise
is left and temperature and seed decide. Sampling, rewinding and saving keep the rules of `protocol`.
"""
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds4mlx.engine.protocol import MemoryPlan, MemoryUse, ModelInfo, Row, Sampling, Step
from ds4mlx.errors import CheckpointError

Script = Callable[[Sequence[int]], Iterable[int | None]]  # prompt -> answer
SCRIPTED = 60.0  # far enough above the noise for temperature 2 over 129,280 tokens
GIB = 1 << 30


def open_stub(path: Path) -> "StubEngine":
    """A stub with the vocabulary of the model file at `path`, which repeats the user's last message as its answer."""
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.text.segments import ASSISTANT, THINK_CLOSE, THINK_OPEN, USER
    from ds4mlx.text.tokenizer import Tokenizer
    with GGUF.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    user, assistant, thinks = (tokenizer.control[literal] for literal in (USER, ASSISTANT, THINK_OPEN))

    def repeat(prompt: Sequence[int]) -> list[int]:
        end = max((i for i, token in enumerate(prompt) if token == assistant), default=len(prompt))
        start = max((i + 1 for i, token in enumerate(prompt[:end]) if token == user), default=0)
        closing = [tokenizer.control[THINK_CLOSE]] if prompt[-1] == thinks else []
        return [*closing, *prompt[start:end]]

    return StubEngine(repeat, vocab=tokenizer.vocab_size, eos=tokenizer.eos)


def echo(prompt: Sequence[int]) -> Sequence[int]:
    """The prompt's last 64 tokens."""
    return prompt[-64:]


class Gate:
    """A place where the engine thread waits until a test lets it pass; then it stands open."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        if not self.opened.wait(60):
            raise RuntimeError("nobody opened the gate within a minute")


class StubSession:
    """Tokens and a script. Rewinds only to marks and to 0, as the strictest real engine would."""

    def __init__(self, context: int, logits: Callable[["StubSession"], np.ndarray]) -> None:
        self.tokens: list[int] = []
        self.context = context
        self._marks: set[int] = set()
        self.epoch = 0      # grows when snapshots become void
        self.closed = False
        self.answer: list[int | None] | None = None  # the script's word on the prompt, asked once
        self.prompt_tokens = 0                       # where the prompt ends and the answer begins
        self._logits = logits

    def logits(self) -> np.ndarray:
        assert self.tokens, "logits need one token at least"
        return self._logits(self)

    @property
    def marks(self) -> list[int]:
        return sorted(self._marks)

    def mark(self) -> None:
        self._marks.add(len(self.tokens))

    def rewind(self, length: int) -> int:
        reached = max(m for m in self._marks | {0, len(self.tokens)} if m <= max(length, 0))
        self.epoch += reached < len(self.tokens)
        del self.tokens[reached:]
        self._marks = {m for m in self._marks if m <= reached}
        self.end_prompt()
        return reached

    def branch(self, other: "StubSession", length: int) -> int:
        reached = max((m for m in {*other.marks, len(other.tokens)} if m <= length), default=0)
        self._become(other.tokens[:reached])
        return reached

    def append(self, tokens: Sequence[int]) -> None:
        if len(self.tokens) + len(tokens) > self.context:
            raise ValueError(f"{len(self.tokens)} + {len(tokens)} tokens do not fit a context of {self.context}")
        self.tokens.extend(tokens)

    def end_prompt(self) -> None:
        """What is here now is a prompt: the next token is the first of its answer."""
        self.prompt_tokens, self.answer = len(self.tokens), None

    def snapshot(self) -> "StubSnapshot":
        return StubSnapshot(np.array(self.tokens, np.uint32), self.logits(), self, self.epoch)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays.keys() != {"tokens", "logits"}:
            raise CheckpointError(f"not a state of the stub: it holds {', '.join(sorted(arrays))}")
        n = len(arrays["tokens"])
        if not 0 < n <= self.context:
            raise CheckpointError(f"state covers {n} tokens, this session takes 1 to {self.context}")
        self._become(arrays["tokens"].tolist())

    def _become(self, tokens: list[int]) -> None:
        self.epoch += 1
        self.tokens, self._marks = tokens, {len(tokens)} - {0}
        self.end_prompt()

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, slots=True)
class StubSnapshot:
    """Tokens and logits: there are no rows, so a head is the whole state."""
    tokens: np.ndarray
    logits: np.ndarray
    session: StubSession
    epoch: int

    def head(self, spans: int) -> dict[str, np.ndarray]:
        if self.session.epoch != self.epoch or self.session.closed:
            raise CheckpointError("the session has gone back since its snapshot was taken; take another one")
        return {"tokens": self.tokens, "logits": self.logits}

    def span(self, index: int) -> dict[str, np.ndarray]:
        return {}


class StubEngine:
    """Engine of `protocol` over a script.

    `before_prefill` and `before_decode` run on the engine thread ahead of each slice and step: a Gate to hold it there,
    a function that raises to make it fail. `step_s` sleeps per decode step. `slices` records the prefilled lengths.
    """

    def __init__(self, script: Script = echo, *, vocab: int = 512, eos: int = 1, context: int = 1 << 20,
                 before_prefill: Callable[[], None] | None = None,
                 before_decode: Callable[[], None] | None = None, step_s: float = 0.0) -> None:
        self.info = ModelInfo("Scripted stub", context, vocab, "none", "stub", "00" * 8, "00" * 8,
                              "00" * 8)
        self.script, self.eos = script, eos
        self.before_prefill, self.before_decode, self.step_s = before_prefill, before_decode, step_s
        self.slices: list[int] = []
        self._noise = np.random.default_rng(0).random(vocab, np.float32)
        self._thread = threading.get_ident()

    def open(self, context: int) -> StubSession:
        return StubSession(context, self._logits)

    def plan(self, context: int, sessions: int) -> MemoryPlan:
        return MemoryPlan(0, 8 * context, sessions, 0, GIB)

    def memory(self) -> MemoryUse:
        return MemoryUse(8 * len(self.slices), 8 * len(self.slices))

    def arrays(self, tokens: int) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {"tokens": ((tokens,), np.dtype(np.uint32)), "logits": ((self.info.vocab,), np.dtype(np.float32))}

    def prefill(self, session: StubSession, tokens: Sequence[int]) -> None:
        self._enter(self.before_prefill)
        assert tokens, "an empty slice"
        session.append(tokens)
        session.end_prompt()
        self.slices.append(len(tokens))

    def decode(self, rows: Sequence[Row]) -> list[list[Step]]:
        self._enter(self.before_decode)
        if self.step_s:
            time.sleep(self.step_s)
        before = [len(row.session.tokens) for row in rows]
        try:
            for row in rows:
                if row.token is not None:
                    row.session.append([row.token])
            return [[sample(row.session.logits(), row.sampling, row.generated, row.mask)] for row in rows]
        except BaseException:
            for row, length in zip(rows, before, strict=True):
                del row.session.tokens[length:]
            raise

    def close(self) -> None:
        pass

    def _enter(self, hook: Callable[[], None] | None) -> None:
        assert threading.get_ident() == self._thread, "an engine belongs to the thread that opened it"
        if hook is not None:
            hook()

    def _logits(self, session: StubSession) -> np.ndarray:
        if session.answer is None:
            session.answer = list(self.script(session.tokens[:session.prompt_tokens]))
        step = len(session.tokens) - session.prompt_tokens
        scripted = session.answer[step] if step < len(session.answer) else self.eos
        logits = np.roll(self._noise, len(session.tokens))
        if scripted is not None:
            logits[scripted] += SCRIPTED
        return logits


def sample(logits: np.ndarray, how: Sampling, generated: Sequence[int] = (), mask: np.ndarray | None = None) -> Step:
    """One token of `logits` f32 [vocab], by the order that `Sampling` states."""
    logprobs = logits - _logsumexp(logits)
    token = _choose(_adjusted(logits, how, generated, mask), how, len(generated))
    best = np.argsort(-logprobs, kind="stable")[:how.top_logprobs]
    return Step(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def _adjusted(logits: np.ndarray, how: Sampling, generated: Sequence[int], mask: np.ndarray | None) -> np.ndarray:
    logits = logits.astype(np.float32)
    for token, bias in how.logit_bias.items():
        logits[token] += bias
    if generated and (how.presence_penalty or how.frequency_penalty or how.repetition_penalty != 1):
        seen, counts = np.unique(np.asarray(generated), return_counts=True)
        scaled = logits[seen]
        scaled = np.where(scaled > 0, scaled / how.repetition_penalty, scaled * how.repetition_penalty)
        logits[seen] = scaled - how.presence_penalty - how.frequency_penalty * counts
    logits[list(how.banned)] = -np.inf
    if mask is not None:
        logits[~mask] = -np.inf
    return logits


def _choose(logits: np.ndarray, how: Sampling, step: int) -> int:
    if how.temperature <= 0 or how.top_p <= 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    order = order[:how.top_k] if how.top_k > 0 else order
    scaled = logits[order] / max(how.temperature, 1e-30)   # as engines do: less is nothing in 32 bits
    p = np.exp(scaled - scaled[0])
    p[p < how.min_p * p[0]] = 0
    p /= p.sum()
    p[1:][np.cumsum(p)[:-1] >= how.top_p] = 0
    uniform = np.random.Generator(np.random.Philox(key=how.seed, counter=step)).random()
    place = np.searchsorted(np.cumsum(p), uniform * p.sum(), side="right")
    return int(order[min(place, np.count_nonzero(p) - 1)])


def _logsumexp(logits: np.ndarray) -> float:
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum()))
