"""How fast an engine is at the end of so many tokens: prefill of the last interval, then decoding there.

A sweep extends one session from frontier to frontier and times the added interval alone. At each it marks the state,
decodes a fixed greedy probe that never ends, goes back to the mark and goes on.
"""
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from ds4mlx.engine.protocol import Row, Sampling

if TYPE_CHECKING:
    import numpy as np

    from ds4mlx.engine.protocol import Engine, Session

Told = Callable[[str, int, int], None]     # what is done at a frontier, tokens of it so far, and in all
WARMUP_STEPS = 4


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured. Sizes in tokens."""
    frontiers: tuple[int, ...]
    context: int                # that each session is opened with
    gen_tokens: int = 128       # of a probe and session; 0: prefill only
    repeat: int = 1             # measurements of a frontier, whose medians count
    warmup: int = 256           # computed and thrown away before the first
    concurrency: int = 1        # sessions that decode together
    teacher_forced: bool = False    # the probe is fed the prompt's own tokens


@dataclass(frozen=True, slots=True)
class Frontier:
    """One row. Of several sessions the `gen_` numbers are sums: tokens and tokens per second of all together."""
    ctx_tokens: int
    prefill_tokens: int         # of the interval that ends here
    prefill_tps: float
    gen_tokens: int
    gen_tps: float
    gen_first_ms: float         # the first step, which also brings the state into the form that steps work on
    gen_steady_tokens: int      # those after the first step
    gen_steady_tps: float
    kvcache_bytes: int          # of one session's state, exported


@dataclass(frozen=True, slots=True)
class Measured:
    """logits f32 [vocab]: of the token after the frontier."""
    row: Frontier
    runs: tuple[Frontier, ...]
    logits: "np.ndarray"


def frontiers(start: int, most: int, incr: int, mul: float) -> tuple[int, ...]:
    """From `start` to `most`, both among them, by steps of `incr`, or by the factor `mul` where that is above 1."""
    found = []
    while start < most:
        found.append(start)
        start = max(start + 1, math.ceil(start * mul)) if mul > 1 else start + incr
    return (*found, most)


def measure(engine: "Engine", ids: Sequence[int], sweep: Sweep, eos: int, chunk: int,
            told: Told = lambda what, done, total: None) -> Iterator[Measured]:
    """One frontier after the other, each when it is complete. `ids` reach the last one at least."""
    sessions = [engine.open(sweep.context) for _ in range(sweep.concurrency)]
    try:
        _warm_up(engine, sessions, ids[:min(sweep.warmup, sweep.frontiers[-1])], eos)
        reached = 0
        for frontier in sweep.frontiers:
            runs = []
            for _ in range(sweep.repeat):
                _go_back(sessions[0], reached)
                prefill_s = _prefill(engine, sessions[0], ids[reached:frontier], chunk, told)
                logits = sessions[0].logits()
                sessions[0].mark()
                forced = ids[frontier:frontier + sweep.gen_tokens] if sweep.teacher_forced else None
                times = _probe(engine, sessions, logits, sweep.gen_tokens, eos, forced, told)
                runs.append(_row(engine, frontier, frontier - reached, prefill_s, times))
                _go_back(sessions[0], frontier)
            yield Measured(_median(runs), tuple(runs), logits)
            reached = frontier
    finally:
        for session in sessions:
            session.close()


def _go_back(session: "Session", length: int) -> None:
    reached = session.rewind(length)
    assert reached == length, f"the mark at {length} is gone, {reached} is the nearest"


def _warm_up(engine: "Engine", sessions: Sequence["Session"], ids: Sequence[int], eos: int) -> None:
    """Kernels are compiled, buffers taken and weights read once before anything counts."""
    if ids:
        engine.prefill(sessions[0], ids)
        steps = min(WARMUP_STEPS, sessions[0].context - len(ids))
        _probe(engine, sessions, sessions[0].logits(), steps, eos, None, lambda what, done, total: None)


def _prefill(engine: "Engine", session: "Session", ids: Sequence[int], chunk: int, told: Told) -> float:
    """Seconds, until the logits can be read."""
    began = time.perf_counter()
    for at in range(0, len(ids), chunk):
        told("prefill", at, len(ids))
        engine.prefill(session, ids[at:at + chunk])
    session.logits()    # which waits for the device
    return time.perf_counter() - began


def _probe(engine: "Engine", sessions: Sequence["Session"], logits: "np.ndarray", steps: int, eos: int,
           forced: Sequence[int] | None, told: Told) -> list[tuple[int, float]]:
    """Tokens and seconds of each step. Session i begins with the i-th likeliest token, so that no two go the same way,
    which would let them share experts as strangers do not."""
    first, *others = sessions
    length = len(first.tokens)
    for other in others if steps else ():
        branched = other.branch(first, length)
        assert branched == length, f"{branched} of {length} tokens are shared"
    begin = [int(token) for token in (-logits).argsort(kind="stable")[:len(sessions) + 1] if token != eos]
    said = [[token] for token in begin[:len(sessions)]]
    if forced is not None:
        said = [[forced[0]] for _ in sessions]
    sampling = Sampling(temperature=0.0, banned=frozenset((eos,)))
    times: list[tuple[int, float]] = []
    while min(map(len, said)) <= steps:
        told("decode", len(said[0]), steps)
        rows = [Row(session, sampling, tokens[-1], tokens) for session, tokens in zip(sessions, said, strict=True)]
        began = time.perf_counter()
        found = engine.decode(rows)
        times.append((sum(map(len, found)), time.perf_counter() - began))
        for tokens, sampled in zip(said, found, strict=True):
            tokens += [step.token for step in sampled] if forced is None or len(tokens) >= len(forced) \
                else [forced[len(tokens)]]
    return times


def _row(engine: "Engine", frontier: int, interval: int, prefill_s: float,
         times: Sequence[tuple[int, float]]) -> Frontier:
    tokens, seconds = sum(count for count, _ in times), sum(s for _, s in times)
    steady, steady_s = sum(count for count, _ in times[1:]), sum(s for _, s in times[1:])
    state = sum(math.prod(shape) * dtype.itemsize for shape, dtype in engine.arrays(frontier).values())
    return Frontier(frontier, interval, _rate(interval, prefill_s), tokens, _rate(tokens, seconds),
                    1e3 * times[0][1] if times else 0.0, steady, _rate(steady, steady_s), state)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _median(runs: Sequence[Frontier]) -> Frontier:
    """Column by column; what was counted is the same in all of them."""
    columns = {name: [asdict(run)[name] for run in runs] for name in asdict(runs[0])}
    return Frontier(**{name: median(values) if isinstance(values[0], float) else values[0]
                       for name, values in columns.items()})
