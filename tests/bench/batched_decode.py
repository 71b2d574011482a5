"""What decoding together brings: tokens a second of all rows, for 1 to 16 rows, against the same rows one by one.

    python tests/bench/batched_decode.py [--model tiny] [--prompt 300] [--tokens 40] [--rounds 3] [--rows 1 2 4 8 16]

Prints a line for each number of rows: all rows in one step, and queued, each session to its end before the next. Best
of the rounds, taken by turns, because other work on the machine only ever slows one; beside it the processor time of a
step, which such work hardly changes. Prefill is not counted. Exits 3 when 8 rows are below --at-least times a single
one, or any number of rows below its queued figure.
"""
import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ds4mlx.cli.model import resolve_model
from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import MLXEngine, open_mlx
from ds4mlx.engine.protocol import Row, Sampling, Session


def prefilled(engine: MLXEngine, rows: int, prompt: int, context: int) -> list[Session]:
    """Sessions of different lengths, near `prompt` tokens."""
    sessions = []
    for i in range(rows):
        session = engine.open(context)
        engine.prefill(session, [5 + (7 * i + j) % 500 for j in range(prompt + 3 * i)])
        sessions.append(session)
    return sessions


@dataclass(frozen=True, slots=True)
class Spent:
    """Of some steps."""
    wall_s: float
    cpu_s: float


def decode(engine: MLXEngine, sessions: Sequence[Session], tokens: int) -> Spent:
    """What `tokens` steps of these sessions take, after one that is not counted: it puts them together."""
    sampling = Sampling(temperature=0.0)
    generated: list[list[int]] = [[] for _ in sessions]
    for step in range(tokens + 2):
        rows = [Row(session, sampling, made[-1] if made else None, made)
                for session, made in zip(sessions, generated, strict=True)]
        for made, (one,) in zip(generated, engine.decode(rows), strict=True):
            made.append(one.token)
        if step == 1:
            began, cpu = time.perf_counter(), time.process_time()
    return Spent(time.perf_counter() - began, time.process_time() - cpu)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second, and milliseconds of processor time that a step of all rows takes."""
    together: float = 0.0
    queued: float = 0.0
    step_cpu_ms: float = float("inf")

    def best(self, other: Self) -> Self:
        return Rates(max(self.together, other.together), max(self.queued, other.queued),
                     min(self.step_cpu_ms, other.step_cpu_ms))


def measured(engine: MLXEngine, rows: int, prompt: int, tokens: int) -> Rates:
    context = prompt + 3 * rows + 2 * tokens + 8
    sessions = prefilled(engine, rows, prompt, context)
    together = decode(engine, sessions, tokens)
    queued = sum(decode(engine, [session], tokens).wall_s for session in sessions)
    for session in sessions:
        session.close()
    return Rates(rows * tokens / together.wall_s, rows * tokens / queued, 1e3 * together.cpu_s / tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--at-least", type=float, default=2.5)
    args = parser.parse_args()
    engine = open_mlx(Settings(ops=args.ops), resolve_model(Settings(model=Path(args.model))))
    print(f"{engine.info.backend}, prompts of {args.prompt} tokens")
    print("rows   together     queued   together/queued   together/one row   processor ms a step")
    best = dict.fromkeys(args.rows, Rates())
    for _ in range(args.rounds):
        for rows in args.rows:
            best[rows] = best[rows].best(measured(engine, rows, args.prompt, args.tokens))
    one = best[args.rows[0]].together / args.rows[0]
    for rows, r in best.items():
        print(f"{rows:4} {r.together:10.1f} {r.queued:10.1f} {r.together / r.queued:17.2f} {r.together / one:18.2f} "
              f"{r.step_cpu_ms:21.1f}")
    slow = any(r.together < r.queued for rows, r in best.items() if rows > 1)
    return 3 if slow or 8 in best and best[8].together < args.at_least * one else 0


if __name__ == "__main__":
    sys.exit(main())
