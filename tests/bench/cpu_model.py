"""How long a whole model takes on this CPU, and how much of that is in the quantised products.

    python tests/slow/full_shape.py FLASH.gguf TOKENIZER.json       a full-shape file of random weights, 3.4 GiB
    python tests/bench/cpu_model.py FLASH.gguf [--prompt tests/data/ds4/italian_175.txt] [--decode 3]

Prefill of the prompt as a chat turn, then greedy tokens, one at a time. For each: passing time, processor time of all
threads, and both again for each function of ops/native.py.
"""
import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Conversation, Message, TextPart
from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.gguf.reader import GGUF
from ds4mlx.ops import native
from ds4mlx.text.tokenizer import Tokenizer

PRODUCTS = ("matmul", "gate_up", "down")
ITALIAN = Path(__file__).parents[1] / "data" / "ds4" / "italian_175.txt"
spent: dict[str, tuple[int, float, float]] = {}  # calls, passing and processor time of each product, in seconds


def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **options: object) -> object:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*args, **options)
        calls, wall_s, cpu_s = spent.get(name, (0, 0.0, 0.0))
        spent[name] = calls + 1, wall_s + time.perf_counter() - wall, cpu_s + time.process_time() - cpu
        return result
    return call


@contextmanager
def lap(what: str) -> Iterator[None]:
    spent.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:16}{wall:8.2f} s   {cpu:8.2f} s of processor time")
    for name, (calls, wall_s, cpu_s) in spent.items():
        print(f"    {name:12}{wall_s:8.2f} s   {cpu_s:8.2f} s   {calls} calls", flush=True)


def prompt_tokens(model: Path, prompt: Path) -> list[int]:
    messages = (Message("system", (TextPart("You are a helpful assistant"),)),
                Message("user", (TextPart(prompt.read_text()),)))
    with GGUF.open(model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    return tokenizer.encode(render(Conversation(messages, thinking=False), effort_profile="preview").segments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=Path, default=ITALIAN)
    parser.add_argument("--decode", type=int, default=3, metavar="TOKENS")
    args = parser.parse_args()
    print(native.describe())
    for name in PRODUCTS:
        setattr(native, name, counted(name, getattr(native, name)))
    engine, tokens = open_mlx(Settings(ctx=4096), args.model), prompt_tokens(args.model, args.prompt)
    session = engine.open(4096)
    with lap(f"{len(tokens)} of prefill"):
        engine.prefill(session, tokens)
        session.logits()
    answer: list[int] = []
    for i in range(args.decode + 1):  # the first is chosen from the logits that are there
        with lap("sampling" if i == 0 else f"token {i}"):
            last = answer[-1] if answer else None
            answer.append(engine.decode([Row(session, Sampling(temperature=0), last, answer)])[0][-1].token)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"{peak / 1e9:.1f} GB resident at most")


if __name__ == "__main__":
    main()
