"""Several requests at once, as their clients and whoever runs the server see them."""
import re
import threading

import pytest
from waiting import idle, read_until, until

from ds4mlx.engine.stub import Gate

QUESTION = [{"role": "user", "content": "Hi there"}]
PATHS = {"/v1/chat/completions": {}, "/v1/completions": {}, "/v1/messages": {"max_tokens": 9}, "/v1/responses": {}}


@pytest.fixture
def held(serve, connect):
    """held(slots, streams, ...): a Server whose engine waits at `.gate`; `.streams` are sockets, all admitted or
    queued."""
    def start(slots, streams, **settings):
        server = serve(settings={"batched_session": slots, "sse_keepalive_seconds": 0.02, **settings})
        server.gate = server.stub.before_prefill = Gate()
        server.streams = []
        for number in range(streams):
            server.streams.append(connect(server, stream=True))
            until(lambda: len(server.service.scheduler.requests) == number + 1)
            assert server.gate.reached.wait(60)     # it holds the first before it can admit a second
        return server

    return start


def requests(server):
    return server.client.get("/admin/requests").json()["requests"]


# ---- the queue

def test_a_stream_that_waits_is_told_its_place_as_it_moves_up(held):
    server = held(1, 3)
    first, second, third = server.streams
    assert b": queued, place 2\n\n" in read_until(third, b": queued, place 2\n\n")
    while b": queued" in read_until(first, b": keepalive"):     # for a moment, before it ran
        pass
    server.service.cancel(requests(server)[1]["id"])
    read_until(third, b": queued, place 1\n\n")
    server.gate.opened.set()
    pieces = re.findall(rb'"content":"([^"]*)"', read_until(third, b"[DONE]"))    # one, or more on a busy machine
    assert b"".join(pieces) == b"Hello."


def test_each_slot_has_a_stream_before_any_waits(held):
    server = held(3, 5)
    until(lambda: server.service.health.active == 1)    # the engine thread is held: it has admitted the first only
    server.gate.opened.set()
    for stream in server.streams:
        read_until(stream, b"[DONE]")
    until(lambda: idle(server))
    use = server.client.get("/stats").json()["slot_use"]
    assert [slot["tokens"] > 0 for slot in use] == [True] * 3 and {slot["phase"] for slot in use} == {"idle"}


def test_progress_that_a_client_does_not_see_puts_off_no_sign_of_life(serve, connect):
    server = serve(settings={"sse_keepalive_seconds": 0.1, "prefill_chunk": 1, "ctx": 4096})
    waits = threading.Event()
    server.stub.before_prefill = lambda: waits.wait(0.01)   # each slice brings a Progress, more often than that
    client = connect(server, stream=True, messages=[{"role": "user", "content": "x" * 300}])
    seen = read_until(client, b"[DONE]")
    done = [int(n) for n in re.findall(rb": keepalive (\d+)/", seen)]
    assert len(done) > 5 and done == sorted(done) and done[0] < 100


# ---- by id

def test_running_and_waiting_requests_are_listed_without_their_words(held):
    server = held(1, 2)
    running, waiting = requests(server)
    assert (running["api"], running["place"], waiting["place"]) == ("chat", 0, 1)
    assert running["id"].startswith("req_") and running["prompt_tokens"] == 12
    assert "Hi there" not in server.client.get("/admin/requests").text
    server.gate.opened.set()


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_is_cancelled_by_its_id_and_its_client_is_told(held, waits):
    server = held(1, 2)
    stream, id = server.streams[waits], requests(server)[waits]["id"]
    assert server.post(f"/admin/requests/{id}/cancel").json() == {"id": id, "cancelled": True}
    server.gate.opened.set()
    seen = read_until(stream, b"[DONE]")
    assert b'"code":"cancelled"' in seen and b'"finish_reason":"stop"' not in seen
    assert b'"finish_reason":"stop"' in read_until(server.streams[not waits], b"[DONE]")
    until(lambda: idle(server))
    assert server.service.metrics.counts.requests == {("chat", "cancelled"): 1, ("chat", "stop"): 1}


@pytest.mark.parametrize("path", PATHS)
def test_whole_answers_end_with_a_status_when_they_are_cancelled_by_id(serve, path):
    server, answers = serve(), []
    server.stub.before_prefill = Gate()
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"input": "Hi"} if "responses" in path else {
        "messages": QUESTION}
    asking = threading.Thread(target=lambda: answers.append(server.post(path, json=body | PATHS[path])))
    asking.start()
    assert server.stub.before_prefill.reached.wait(60)
    id = requests(server)[0]["id"]
    server.post(f"/admin/requests/{id}/cancel")
    server.stub.before_prefill.opened.set()
    asking.join(60)
    assert answers[0].status_code == 409 and answers[0].headers["x-request-id"] == id
    assert "cancelled by id" in answers[0].text


def test_an_unknown_id_is_no_request(serve):
    refused = serve().post("/admin/requests/req_none/cancel")
    assert refused.status_code == 404 and "GET /admin/requests" in refused.json()["error"]["message"]


@pytest.mark.parametrize("headers, status", [({}, 401), ({"x-api-key": "k"}, 404)])
def test_cancelling_needs_the_key(serve, headers, status):
    server = serve(settings={"api_key": "k"})
    assert server.post("/admin/requests/req_none/cancel", headers=headers).status_code == status
    assert server.client.get("/admin/requests", headers=headers).status_code in (200, 401)


def test_cancelling_needs_a_host_that_leads_here(serve):
    headers = {"host": "elsewhere.example"}
    assert serve().post("/admin/requests/req_none/cancel", headers=headers).status_code == 403


# ---- figures

def test_health_stats_and_metrics_tell_of_each_slot(serve):
    server = serve(settings={"batched_session": 3})
    server.chat("Hello there")
    until(lambda: idle(server))
    assert server.client.get("/health").json()["slots"] == server.client.get("/stats").json()["slots"] == 3
    held = [int(n) for n in re.findall(r'ds4mlx_slot_tokens\{slot="\d"\} (\d+)', server.client.get("/metrics").text)]
    assert len(held) == 3 and held[0] > 10 and held[1:] == [0, 0]
