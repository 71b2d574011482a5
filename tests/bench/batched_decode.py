"""What decoding together brings: tokens a second of all rows, for 1 to 16 rows, against the same rows one by one.

    python tests/bench/batched_decode.py [--model tiny] [--prompt 300] [--tokens 40] [--rounds 3] [--rows 1 2 4 8 16]

Prints a line for each number of rows: all rows in one step, and queued, each session to its end before the next. Best
of the rounds, taken by turns, because other work on the machine only ever slows one. Prefill is not counted. With
--lookahead on or off, where the device computes on its own, steps begin before or after the tokens are read. Exits 3
when 8 rows are below --at-least times a single one, or any number of rows below its queued figure.
"""
import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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


def decode(engine: MLXEngine, sessions: Sequence[Session], tokens: int) -> float:
    """Seconds that `tokens` steps of these sessions take, after one that is not counted: it puts them together."""
    sampling = Sampling(temperature=0.0)
    generated: list[list[int]] = [[] for _ in sessions]
    for step in range(tokens + 2):
        rows = [Row(session, sampling, made[-1] if made else None, made)
                for session, made in zip(sessions, generated, strict=True)]
        for made, (one,) in zip(generated, engine.decode(rows), strict=True):
            made.append(one.token)
        if step == 1:
            began = time.perf_counter()
    return time.perf_counter() - began


def measured(engine: MLXEngine, rows: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, together and queued."""
    context = prompt + 3 * rows + 2 * tokens + 8
    sessions = prefilled(engine, rows, prompt, context)
    together = decode(engine, sessions, tokens)
    queued = sum(decode(engine, [session], tokens) for session in sessions)
    for session in sessions:
        session.close()
    return rows * tokens / together, rows * tokens / queued


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--lookahead", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--at-least", type=float, default=2.5)
    args = parser.parse_args()
    engine = open_mlx(Settings(ops=args.ops), resolve_model(Settings(model=Path(args.model))))
    if args.lookahead != "auto":
        engine.lookahead = args.lookahead == "on"
    print(f"{engine.info.backend}, lookahead {'on' if engine.lookahead else 'off'}, prompts of {args.prompt} tokens")
    print("rows   together     queued   together/queued   together/one row")
    best: dict[int, tuple[float, float]] = {rows: (0.0, 0.0) for rows in args.rows}
    for _ in range(args.rounds):
        for rows in args.rows:
            rates = measured(engine, rows, args.prompt, args.tokens)
            best[rows] = max(best[rows][0], rates[0]), max(best[rows][1], rates[1])
    one = best[args.rows[0]][0]
    for rows, (together, queued) in best.items():
        print(f"{rows:4} {together:10.1f} {queued:10.1f} {together / queued:17.2f} {together / one:18.2f}")
    slow = any(together < queued for rows, (together, queued) in best.items() if rows > 1)
    return 3 if slow or 8 in best and 1 in best and best[8][0] < args.at_least * best[1][0] else 0


if __name__ == "__main__":
    sys.exit(main())
