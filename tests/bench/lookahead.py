"""What it brings to begin a step before its tokens are read: milliseconds a step, with and without, for a host that
works between steps as a server does.

    python tests/bench/lookahead.py [--model FILE] [--ops auto] [--rows 1 8] [--host-ms 0 1 3] [--tokens 40]

Worth running where the device computes on its own: ds4mlx's CPU operations compute at once, so there is nothing to
gain. Best of the rounds, taken by turns. Checks that both say the same; exits 3 if not.
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


def work(seconds: float) -> None:
    """Keep this thread busy, as parsing does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def decode(engine: MLXEngine, sessions: Sequence[Session], tokens: int,
           host_s: float) -> tuple[float, list[list[int]]]:
    """Seconds a step, and what was said from each session's mark on."""
    generated: list[list[int]] = [[] for _ in sessions]
    for step in range(tokens + 3):
        rows = [Row(session, Sampling(temperature=0.0), made[-1] if made else None, made)
                for session, made in zip(sessions, generated, strict=True)]
        for made, (one,) in zip(generated, engine.decode(rows), strict=True):
            made.append(one.token)
        work(host_s)
        if step == 2:
            began = time.perf_counter()
    seconds = (time.perf_counter() - began) / tokens
    for session in sessions:
        session.rewind(session.marks[-1])
    return seconds, generated


def prefilled(engine: MLXEngine, rows: int, prompt: int, context: int) -> list[Session]:
    sessions = [engine.open(context) for _ in range(rows)]
    for i, session in enumerate(sessions):
        engine.prefill(session, [5 + (7 * i + j) % 500 for j in range(prompt + 3 * i)])
        session.mark()
    return sessions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("tiny"))
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--host-ms", type=float, nargs="+", default=[0.0, 1.0, 3.0])
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    engine = open_mlx(Settings(ops=args.ops), resolve_model(Settings(model=args.model)))
    print(f"{engine.info.backend}, prompts of {args.prompt} tokens\nrows   host ms   without ms   with ms   gain ms")
    same = True
    for rows in args.rows:
        sessions = prefilled(engine, rows, args.prompt, args.prompt + 3 * rows + args.tokens + 8)
        for host_ms in args.host_ms:
            best, said = {False: float("inf"), True: float("inf")}, {}
            for _ in range(args.rounds):
                for lookahead in best:
                    engine.lookahead = lookahead
                    seconds, said[lookahead] = decode(engine, sessions, args.tokens, host_ms / 1e3)
                    best[lookahead] = min(best[lookahead], seconds)
            same &= said[False] == said[True]
            without, ahead = best[False] * 1e3, best[True] * 1e3
            print(f"{rows:4} {host_ms:9.1f} {without:12.2f} {ahead:9.2f} {without - ahead:9.2f}")
        for session in sessions:
            session.close()
    print("the same tokens" if same else "NOT the same tokens")
    return 0 if same else 3


if __name__ == "__main__":
    sys.exit(main())
