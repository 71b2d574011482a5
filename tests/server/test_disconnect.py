"""A client that leaves stops its work, on every route that computes, in every phase; what was computed is kept."""
import json
import socket

import pytest
from waiting import idle, until

from ds4mlx.engine.stub import Gate
from ds4mlx.server.app import ROUTES

QUESTION = [{"role": "user", "content": "Hi there"}]
# route -> bodies that ask for an answer
BODIES = {
    "/v1/chat/completions": [{"messages": QUESTION}],
    "/v1/completions": [{"prompt": "Hi there"}, {"prompt": "Hi there", "raw": True}, {"prompt": list(range(40, 52))}],
    "/v1/messages": [{"messages": QUESTION, "max_tokens": 3000}],
    "/v1/responses": [{"input": QUESTION}],
}
WITHOUT_ANSWER = {"/v1/messages/count_tokens", "/admin/requests/{id}/cancel"}
REQUESTS = [(route.path, body | {"stream": stream}) for route in ROUTES if "POST" in route.methods
            for body in BODIES.get(route.path, []) for stream in (True, False)]


def names(request):
    path, body = request
    return f"{path} {next(iter(body))} {'raw ' * ('raw' in body)}{'stream' if body['stream'] else 'whole'}"


@pytest.fixture
def connect():
    """connect(server, path, body): a socket that has sent a request."""
    sockets = []

    def send(server, path, body):
        content = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        sockets.append(socket.create_connection((host, int(port)), timeout=60))
        sockets[-1].sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                            % (path.encode(), len(content)) + content)
        return sockets[-1]

    yield send
    for connection in sockets:
        connection.close()


def test_no_route_that_computes_is_left_out():
    assert {route.path for route in ROUTES if "POST" in route.methods} <= BODIES.keys() | WITHOUT_ANSWER


@pytest.mark.parametrize("request_", REQUESTS, ids=map(names, REQUESTS))
@pytest.mark.parametrize("phase", ["before_prefill", "before_decode"])
def test_leaving_frees_the_slot_and_keeps_what_was_computed(serve, connect, request_, phase):
    server, gate = serve("x" * 3000, settings={"prefill_chunk": 8}), Gate()
    setattr(server.stub, phase, gate)
    client = connect(server, *request_)
    assert gate.reached.wait(60)
    answer, = server.service.scheduler.requests
    client.close()
    until(lambda: answer.given_up)
    gate.opened.set()
    until(lambda: idle(server))
    kept = len(server.service.scheduler.slots[0].session.tokens)
    assert kept == 8 if phase == "before_prefill" else kept >= answer.prompt_tokens
    counted = server.service.metrics.counts
    assert list(counted.requests) == [(answer.turn.api, "cancelled")] and counted.generated_tokens <= 1


@pytest.mark.parametrize("request_", REQUESTS, ids=map(names, REQUESTS))
def test_leaving_the_queue_costs_nothing(serve, connect, request_):
    server, gate = serve(), Gate()
    server.stub.before_prefill = gate
    connect(server, "/v1/chat/completions", {"messages": QUESTION, "stream": True})
    assert gate.reached.wait(60)
    waiting = connect(server, *request_)
    until(lambda: server.service.health.queued == 1)
    waiting.close()
    until(lambda: not server.service.health.queued)
    assert [finish for _, finish in server.service.metrics.counts.requests] == ["cancelled"]
    gate.opened.set()
    until(lambda: idle(server))
    assert server.service.metrics.counts.requests["chat", "stop"] == 1
