"""What HTTP streaming costs: tokens per second through the server against the bare engine loop, same model and prompt.

    python tests/bench/server_overhead.py [--model tiny] [--engine mlx] [--tokens 400] [--rounds 5] [--together 4]

Both run in this process, by turns, each on an engine of its own; the client is another process, as clients are. Rates
are tokens over the whole time, prompt and connection included. Prints a line per round, then the ratio of the best
rounds, because other work on the machine only ever slows one, and the processor time of a token, which such work hardly
changes. Exits 3 when the first is below --at-least. With --together so many clients then ask at once.
"""
import argparse
import asyncio
import json
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Conversation, Message, TextPart
from ds4mlx.cli.model import resolve_model
from ds4mlx.config import Settings
from ds4mlx.engine.open import open_engine
from ds4mlx.engine.protocol import Engine, Row, Sampling
from ds4mlx.server.app import create_app
from ds4mlx.server.listen import bind, listen
from ds4mlx.service.service import Service, open_service


def body(prompt: str, tokens: int, eos: int | None) -> bytes:
    """A request for exactly `tokens` tokens, where `eos` is given: it cannot come."""
    return json.dumps({"messages": [{"role": "user", "content": prompt}], "thinking": False, "temperature": 0,
                       "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
                       **({} if eos is None else {"logit_bias": {eos: -100}})}).encode()


@dataclass(frozen=True, slots=True)
class Round:
    tokens: int
    wall_s: float
    cpu_s: float  # of this process: engine and, where there is one, server

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s


def bare(engine: Engine, prompt: list[int], tokens: int, eos: int | None) -> Round:
    """A loop that does nothing but prefill and decode."""
    began, cpu = time.perf_counter(), time.process_time()
    session, generated = engine.open(len(prompt) + tokens), []
    sampling = Sampling(temperature=0.0, logit_bias={} if eos is None else {eos: -100.0})
    engine.prefill(session, prompt)
    while len(generated) < tokens:
        row = Row(session, sampling, generated[-1] if generated else None, generated)
        generated += [step.token for step in engine.decode([row])[0]]
    session.close()
    return Round(len(generated), time.perf_counter() - began, time.process_time() - cpu)


def client(port: int, prompt: str, tokens: int, eos: int | None) -> tuple[int, float, float]:
    """Tokens that a streaming client gets, and when the request was sent and the answer had ended, in seconds."""
    content = body(prompt, tokens, eos)
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        began = time.perf_counter()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(content) + content)
        lines = list(connection.makefile("rb"))
        ended = time.perf_counter()
    usage = next(json.loads(line[6:])["usage"] for line in lines if b'"completion_tokens":' in line)
    return usage["completion_tokens"], began, ended


async def served(port: int, prompts: Sequence[str], tokens: int, eos: int | None) -> Round:
    """A client for each prompt, all at once; processes of one machine share a clock."""
    cpu = time.process_time()
    processes = [await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", str(port), "--prompt", prompt, "--tokens", str(tokens),
        *([] if eos is None else ["--eos", str(eos)]), stdout=asyncio.subprocess.PIPE) for prompt in prompts]
    answers = await asyncio.gather(*(process.communicate() for process in processes))
    counts, began, ended = zip(*(json.loads(out) for out, _ in answers))
    return Round(sum(counts), max(ended) - min(began), time.process_time() - cpu)


async def measure(options: Namespace, settings: Settings) -> float:
    """The ratio of the best rounds."""
    service: Service = open_service(settings)
    await service.start()
    bound, stop = bind(settings), asyncio.Event()
    port = bound.getsockname()[1]
    serving = asyncio.create_task(listen(create_app(service, settings), settings, bound, stop))
    engine = open_engine(settings)
    rounds = []
    eos = None if options.plain else service.tokenizer.eos
    bare(engine, [0], 2, eos)  # what is loaded with the first bias is not part of a round
    for number in range(options.rounds):
        prompt = f"{number} {options.prompt}"  # a new one each time: a repeated prompt would be reused
        question = Message("user", (TextPart(prompt),))
        segments = render(Conversation((question,), thinking=False), effort_profile=service.effort_profile).segments
        ids = service.tokenizer.encode(segments)
        rounds.append((bare(engine, ids, options.tokens, eos), await served(port, [prompt], options.tokens, eos)))
        print("bare loop {0.tokens} tokens {0.rate:8.1f} t/s   through HTTP {1.tokens} tokens {1.rate:8.1f} t/s"
              .format(*rounds[-1]), flush=True)
    engine.close()
    for number in range(options.rounds if options.together else 0):
        prompts = [f"{number} {i} {options.prompt}" for i in range(options.together)]
        found = await served(port, prompts, options.tokens, eos)
        print(f"{options.together} clients at once {found.tokens} tokens {found.rate:8.1f} t/s", flush=True)
    stop.set()
    await serving
    await service.close(10)
    loop, http = zip(*rounds)
    ratio = max(r.rate for r in http) / max(r.rate for r in loop)
    cpu_ms = [1000 * sum(r.cpu_s for r in way) / sum(r.tokens for r in way) for way in (loop, http)]
    print(f"{service.info.name}, {service.info.backend}: {100 * ratio:.1f} % of the bare loop's rate; "
          f"processor time {cpu_ms[0]:.2f} ms a token, through HTTP {cpu_ms[1]:.2f} ms")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engine", default="mlx")
    parser.add_argument("--prompt", default="Tell me about the sea.")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, default=0, help="then, so many clients at once")
    parser.add_argument("--plain", action="store_true", help="let EOS come: a bias against it costs a card's step")
    parser.add_argument("--at-least", type=float, default=0.0, help="ratio below which to exit with 3")
    parser.add_argument("--eos", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(client(options.client, options.prompt, options.tokens, options.eos)))
        return 0
    settings = Settings.load("serve", {"model": options.model, "engine": options.engine, "port": 0,
                                       "batched_session": max(1, options.together)})
    settings = replace(settings, model=resolve_model(settings))
    return 0 if asyncio.run(measure(options, settings)) >= options.at_least else 3


if __name__ == "__main__":
    sys.exit(main())
