"""A real server on a free port of 127.0.0.1, over the stub engine and a vocabulary of single bytes."""
import asyncio
import json
import threading
from dataclasses import dataclass, field

import httpx2
import pytest

from ds4mlx.config import Settings
from ds4mlx.engine.stub import StubEngine
from ds4mlx.server.app import create_app
from ds4mlx.server.listen import bind, listen, url
from ds4mlx.service.service import Service
from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The control tokens, BOS 0 and EOS 1, then the 256 bytes."""
    return Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")


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


@pytest.fixture(scope="session")
def start_server(tokenizer):
    """start_server(answer, settings=, **stub): a running Server that answers every prompt with the text `answer`.

    Control literals in the text become control tokens. Pass `script` instead for other engines' behaviour.
    """
    def start(answer="Hello.", *, script=None, settings=None, effort_profile="0731", **stub):
        ids = tokenizer.encode_marked(answer)
        settings = Settings(**{"port": 0, "ctx": 4096, "drain_seconds": 5, **(settings or {})})
        engines, running = [], []
        service = Service(lambda: engines.append(StubEngine(script or (lambda prompt: ids), vocab=tokenizer.vocab_size,
                                                            eos=tokenizer.eos, **stub)) or engines[0],
                          tokenizer, settings, effort_profile)
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
        assert up.wait(10)
        address, loop, stop = running
        client = httpx2.Client(base_url=address, timeout=20, trust_env=False)
        return Server(address, service, engines[0], client, loop, stop, thread)

    return start


@pytest.fixture(scope="session")
def stop_server():
    return stop


def stop(server):
    server.client.close()
    server.loop.call_soon_threadsafe(server.stop.set)
    server.thread.join(20)
    assert not server.thread.is_alive()


@pytest.fixture
def serve(start_server):
    """A server of the test's own; the arguments of `start_server`."""
    servers = []
    yield lambda *args, **kwargs: servers.append(start_server(*args, **kwargs)) or servers[-1]
    for server in servers:
        stop(server)


@pytest.fixture(scope="module")
def server(start_server):
    """One server for the tests of a file: it answers "Hello."."""
    shared = start_server()
    yield shared
    stop(shared)


@pytest.fixture(scope="session", autouse=True)
def installation(tmp_path_factory):
    """A state directory of the tests' own: servers make the key for sealed reasoning there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4MLX_HOME", str(tmp_path_factory.mktemp("home")))
        yield
