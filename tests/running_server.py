"""A real server on a free port of 127.0.0.1, over the stub engine: everything but the weights."""
import asyncio
import json
import threading
from dataclasses import dataclass, field

import httpx2

from ds4mlx.cli.serve import open_trace
from ds4mlx.config import Settings
from ds4mlx.engine.stub import StubEngine
from ds4mlx.server.app import create_app
from ds4mlx.server.listen import bind, listen, url
from ds4mlx.service.service import Service


@dataclass
class Server:
    url: str
    service: Service
    stub: StubEngine
    client: httpx2.Client
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread = field(repr=False)

    def post(self, path="/v1/chat/completions", **kwargs):
        return self.client.post(path, **kwargs)

    def chat(self, content="Hi", **fields):
        """One request without reasoning, its answer as JSON."""
        return self.post(json=body(content, **fields)).json()

    def events(self, content="Hi", **fields):
        """The data of each event of a stream; the last is "[DONE]"."""
        with self.client.stream("POST", "/v1/chat/completions", json=body(content, stream=True, **fields)) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def body(content="Hi", **fields):
    return {"messages": [{"role": "user", "content": content}], "thinking": False, **fields}


def start(tokenizer, script, *, settings=None, effort_profile="0731", **stub):
    """A running Server whose engine samples what `script` makes of a prompt's ids; `settings` differ from the defaults
    of tests, `stub` goes to the engine."""
    settings = Settings(**{"port": 0, "ctx": 4096, "drain_seconds": 5, **(settings or {})})
    engines, running = [], []
    service = Service(lambda: engines.append(StubEngine(script, vocab=tokenizer.vocab_size, eos=tokenizer.eos,
                                                        **stub)) or engines[0],
                      tokenizer, settings, effort_profile)
    service.trace = open_trace(settings)
    up = threading.Event()

    async def main():
        await service.start()
        engines[0].slices.clear()  # the warm-up's
        bound, stop = bind(settings), asyncio.Event()
        bound.listen()
        running.extend([url(bound), asyncio.get_running_loop(), stop])
        up.set()
        await listen(create_app(service, settings), settings, bound, stop)
        await service.close(settings.drain_seconds)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert up.wait(60)
    address, loop, stop = running
    client = httpx2.Client(base_url=address, timeout=60, trust_env=False)
    return Server(address, service, engines[0], client, loop, stop, thread)


def stop(server):
    server.client.close()
    server.loop.call_soon_threadsafe(server.stop.set)
    server.thread.join(60)
    assert not server.thread.is_alive()
