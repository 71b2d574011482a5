"""How long a stream waits between two tokens while a long prompt is computed beside it.

    python tests/bench/prefill_gaps.py [--model tiny] [--prompt 30000] [--quantum 128]

One answer streams alone for a while; then a prompt of so many tokens joins, and the stream goes on until it is in. The
prompt is computed a quantum between two steps, so a gap is the time of a step and of a quantum. Prints both, and the
largest gap in quanta, the last of which take longest. Exits 3 when it is above --at-most.
"""
import argparse
import asyncio
import sys
import time
from argparse import Namespace
from dataclasses import replace
from statistics import median

from ds4mlx.chat.events import Finish, Progress
from ds4mlx.chat.messages import Conversation
from ds4mlx.cli.model import resolve_model
from ds4mlx.config import Settings
from ds4mlx.engine.protocol import Sampling
from ds4mlx.service.answer import Answer
from ds4mlx.service.service import Service, open_service
from ds4mlx.service.turn import Turn

ALONE = 60      # tokens of the stream before the prompt joins


async def stream(answer: Answer, tokens: list[float], seconds: list[float]) -> None:
    """Notes how many tokens there are, and when, each time that some more have come."""
    async for _ in answer:
        if answer.completion_tokens > (tokens[-1] if tokens else 0):
            tokens.append(answer.completion_tokens)
            seconds.append(time.perf_counter())


async def measure(service: Service, options: Namespace) -> float:
    """The largest gap in quanta."""
    endless = Sampling(temperature=0.0, logit_bias={service.tokenizer.eos: -100.0})
    turn = Turn(Conversation(()), endless, max_tokens=100_000, api="completions")
    tokens: list[float] = []
    seconds: list[float] = []
    streaming = service.complete(turn, [5, 6, 7])
    reading = asyncio.create_task(stream(streaming, tokens, seconds))
    while streaming.completion_tokens < ALONE:
        await asyncio.sleep(0.001)
    joined = time.perf_counter()
    prompt = [2 + (7 * i) % 500 for i in range(options.prompt)]
    beside = service.complete(replace(turn, max_tokens=1), prompt)
    began = ended = joined
    async for event in beside:
        if isinstance(event, Progress):
            began, ended = (time.perf_counter(), ended) if not event.done else (began, time.perf_counter())
        assert not isinstance(event, Finish) or event.reason == "length", event
    await streaming.aclose()
    reading.cancel()
    gaps = [later - before for before, later in zip(seconds, seconds[1:]) if began <= before and later <= ended]
    step = median(later - before for before, later in zip(seconds, seconds[1:]) if later < joined)
    quanta = -(-options.prompt // options.quantum)
    last = median(sorted(gaps)[-len(gaps) // 10:]) - step       # the tenth that took longest
    print(f"{service.info.name}, {service.info.backend}: a step alone {1000 * step:.1f} ms; {options.prompt} tokens in "
          f"{quanta} quanta took {ended - began:.1f} s, and tokens came {len(gaps)} times meanwhile")
    print(f"gaps: {1000 * median(gaps):.1f} ms in the middle, {1000 * max(gaps):.1f} ms at most, which is "
          f"{max(gaps) / last:.2f} quanta of {1000 * last:.1f} ms")
    return max(gaps) / last


async def run(options: Namespace) -> float:
    settings = Settings.load("serve", {"model": options.model, "ctx": options.prompt + 4096, "batched_session": 2,
                                       "mixed_prefill_quantum": options.quantum})
    service = open_service(replace(settings, model=resolve_model(settings)))
    await service.start()
    try:
        return await measure(service, options)
    finally:
        await service.close(5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompt", type=int, default=30_000)
    parser.add_argument("--quantum", type=int, default=128)
    parser.add_argument("--at-most", type=float, default=float("inf"), help="quanta above which to exit with 3")
    options = parser.parse_args()
    return 0 if asyncio.run(run(options)) <= options.at_most else 3


if __name__ == "__main__":
    sys.exit(main())
