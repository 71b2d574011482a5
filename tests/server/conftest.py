"""A real server on a free port of 127.0.0.1, over the stub engine and a vocabulary of single bytes."""
import socket

import pytest
from running_server import start, stop
from waiting import request_bytes

from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The control tokens, BOS 0 and EOS 1, then the 256 bytes."""
    return Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")


@pytest.fixture(scope="session")
def start_server(tokenizer):
    """start_server(answer, settings=, **stub): a running Server that answers every prompt with the text `answer`.

    Control literals in the text become control tokens. Pass `script` instead for other engines' behaviour.
    """
    def start_answering(answer="Hello.", *, script=None, **kwargs):
        ids = tokenizer.encode_marked(answer)
        return start(tokenizer, script or (lambda prompt: ids), **kwargs)

    return start_answering


@pytest.fixture(scope="session")
def stop_server():
    return stop


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


@pytest.fixture
def connect():
    """connect(server, **fields): a socket that has sent a chat request."""
    sockets = []

    def send(server, **fields):
        host, port = server.url.removeprefix("http://").split(":")
        sockets.append(socket.create_connection((host, int(port)), timeout=60))
        sockets[-1].sendall(request_bytes(**fields))
        return sockets[-1]

    yield send
    for connection in sockets:
        connection.close()


@pytest.fixture(scope="module")
def browser():
    """Chromium, for a file's tests. Not for longer: while Playwright runs, this thread can run no event loop."""
    from browser import chromium
    with chromium() as running:
        yield running


@pytest.fixture
def tabs(browser):
    """Pages of a test's own, which may complain of nothing."""
    from browser import Tabs
    opened = Tabs(browser)
    yield opened
    opened.close()
    assert opened.faults == []


@pytest.fixture(scope="session")
def script_of(tokenizer):
    """script_of({word: answer, ...}): a script that answers by the last of these words in the prompt."""
    def made(answers):
        def script(prompt):
            said = tokenizer.decode(prompt)
            return tokenizer.encode_marked(answers[max(answers, key=said.rfind)])

        return script

    return made


@pytest.fixture(scope="session", autouse=True)
def installation(tmp_path_factory):
    """A state directory of the tests' own: servers make the key for sealed reasoning there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4MLX_HOME", str(tmp_path_factory.mktemp("home")))
        yield
