"""What holds for every route: ids, hosts, keys, CORS, methods, and nobody's text in the logs."""
import contextlib
import logging
import re
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from waiting import read_until, until

from ds4mlx.config import Settings
from ds4mlx.engine.stub import StubEngine
from ds4mlx.errors import Ds4Error
from ds4mlx.server.app import Gate, create_app
from ds4mlx.server.listen import bind, url
from ds4mlx.service.service import Service


def test_every_response_has_a_request_id_of_its_own(server):
    ids = {server.client.get(path).headers["x-request-id"] for path in ("/", "/health", "/nothing")}
    assert len(ids) == 3 and all(i.startswith("req_") and len(i) == len("req_") + 24 for i in ids)


def test_whole_answers_say_how_much_of_the_prompt_was_reused(serve):
    server = serve()
    question = "a long question " * 50
    tokens = server.chat(question)["usage"]["prompt_tokens"]
    headers = server.post(json={"messages": [{"role": "user", "content": question}], "thinking": False}).headers
    assert (headers["x-ds4mlx-cache-source"], headers["x-ds4mlx-cached-tokens"]) == ("memory-rewind", str(tokens))
    assert headers["x-ds4mlx-cache"].startswith(f"memory-rewind; reused={tokens}; prompt={tokens};")


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/v1/health", "/v1/models", "/v1/models/",
                                  "/v1/models?limit=1000", "/v1/models/deepseek-chat"])
def test_get_and_head_are_answered(server, path):
    assert server.client.get(path).status_code == server.client.head(path).status_code == 200


def test_health_counts_and_describes(server):
    health = server.client.get("/health").json()
    assert (health["status"], health["context_length"], health["slots"]) == ("ok", 4096, 1)
    assert (health["active"], health["queued"]) == (0, 0)


def test_while_the_model_loads_health_says_so_and_requests_are_put_off(tokenizer):
    loading = Service(StubEngine, tokenizer, Settings())
    with TestClient(create_app(loading, Settings()), base_url="http://localhost") as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        for refused in (client.get("/v1/models"), client.post("/v1/chat/completions", json={})):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert refused.headers["retry-after"] == "5"


def test_the_model_list_serves_both_kinds_of_client(serve):
    listed = serve(settings={"served_model_name": ("mine",), "tokens": 100}).client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["deepseek-v4-flash", "mine"]
    assert (listed["object"], listed["has_more"], listed["last_id"]) == ("list", False, "mine")
    card = listed["data"][0]
    assert (card["object"], card["type"], card["context_length"]) == ("model", "model", 4096)
    assert card["top_provider"]["max_completion_tokens"] == 100


def test_an_unknown_model_is_a_404(server):
    answer = server.client.get("/v1/models/gpt")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_unknown_route_names_the_known_ones(server):
    answer = server.client.get("/v2/chat")
    assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"]
    assert "drop one /v1" in server.post("/v1/v1/chat/completions", json={}).json()["error"]["message"]


def test_a_wrong_method_names_the_right_one(server):
    answer = server.client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_headers_over_64_kib_are_refused(server):
    assert server.client.get("/health", headers={"x": "a" * (64 << 10)}).status_code == 431


def test_a_refused_request_leaves_its_connection_usable(server):
    for _ in range(20):  # refused before the body was read, over one connection
        assert server.post("/v1/nothing", content=b"x" * 200_000).status_code == 404
    assert server.chat()["choices"]


def test_a_body_that_stops_coming_is_answered_and_ends_its_connection(server, monkeypatch):
    monkeypatch.setattr("ds4mlx.server.app.SILENCE_S", 0.05)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer and b"nothing of the body" in answer


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("my.box", 200),
    ("evil.example", 403), ("localhost.evil.example:80", 403), ("[::1", 200)])
def test_on_loopback_only_local_names_are_answered(serve, host, status):
    server = serve(settings={"allow_host": ("My.Box",)})
    assert server.client.get("/health", headers={"host": host}).status_code == status


@pytest.mark.parametrize("bind", ["127.1", "localhost"])
def test_loopback_is_known_in_any_spelling(serve, bind):
    assert serve(settings={"host": bind}).client.get("/health", headers={"host": "evil.example"}).status_code == 403


def test_elsewhere_any_host_is_answered(serve):
    server = serve(settings={"host": "0.0.0.0"})
    assert server.client.get("/health", headers={"host": "any.example"}).status_code == 200


@pytest.fixture(scope="module")
def locked(start_server, stop_server):
    guarded = start_server(settings={"api_key": "secret"})
    yield guarded
    stop_server(guarded)


@pytest.mark.parametrize("headers, status", [
    ({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "Bearer secre\u00e9"}, 401),
    ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "secret"}, 200)])
def test_a_key_is_asked_for_by_every_api_route(locked, headers, status):
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    assert locked.client.get("/v1/models", headers=headers).status_code == status
    assert locked.client.get("/health", headers=headers).status_code == 200


def test_without_cors_no_such_header_is_sent(server):
    assert not [name for name in server.client.get("/health").headers if name.startswith("access-control")]
    assert server.client.options("/v1/chat/completions").status_code == 204


def test_a_cors_preflight_may_ask_for_authorization(serve):
    server = serve(settings={"cors": True, "api_key": "secret"})
    answer = server.client.options("/v1/chat/completions", headers={
        "origin": "http://page.example", "access-control-request-headers": "authorization,content-type"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert server.client.get("/v1/models").headers["access-control-allow-origin"] == "*"


def test_no_text_of_prompts_or_answers_is_logged(serve, caplog):
    server = serve("secret-answer</think>secret-text")
    with caplog.at_level(logging.DEBUG):
        server.chat("secret-prompt", thinking=True)
        server.events("secret-prompt", stop="secret-stop")
        server.post(content=b'{"messages": [{"role": "user", "content": ["secret-part"]}]}')
        server.stub.before_decode = lambda: 1 / 0
        server.chat("secret-prompt")
    ours = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("http"))
    assert "secret" not in ours and "the engine failed" in ours


def test_a_broken_request_is_logged_by_its_place_and_not_its_words(tokenizer, caplog):
    async def broken(scope, receive, send):
        raise ValueError(scope["query_string"])

    gate = Gate(broken, Settings(), Service(StubEngine, tokenizer, Settings()))
    answer = TestClient(gate, base_url="http://localhost").get("/health?secret")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in caplog.text + answer.text and "ValueError" in caplog.text and "in broken" in caplog.text


def test_each_request_logs_one_line_of_numbers(serve, caplog):
    server = serve()
    with caplog.at_level(logging.INFO, "ds4mlx.request"):
        server.chat("a long question " * 50)
        server.chat("a long question " * 50)
    lines = [record.getMessage() for record in caplog.records if record.name == "ds4mlx.request"]
    prompt = lines[0].partition(":")[0].partition("..")[2]
    assert f"chat ctx=0..{prompt}:{prompt} tools=0 nothink gen=" in lines[0] and " finish=stop " in lines[0]
    assert f"chat ctx={prompt}..{prompt}:0 " in lines[1] and " src=memory-rewind " in lines[1]


def test_a_long_request_logs_each_chunk_of_its_prompt_and_every_fifty_tokens(serve, caplog):
    server = serve("word " * 21, settings={"prefill_chunk": 128})       # 105 tokens, one for each byte
    with caplog.at_level(logging.INFO, "ds4mlx.progress"):
        server.chat("x" * 300)
    lines = [record.getMessage() for record in caplog.records if record.name == "ds4mlx.progress"]
    rate = re.compile(r" \d+\.\d t/s .*")
    total = lines[0].partition("/")[2].partition(" ")[0]
    assert [rate.sub("", line) for line in lines] == [
        f"prefill 128/{total}", f"prefill 256/{total}", f"prefill {total}/{total}", "decode 50", "decode 100"]


def test_a_port_in_use_is_one_clear_error(server):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(Ds4Error, match=f"cannot listen on 127.0.0.1:{port}"):
        bind(Settings(port=port))


@pytest.fixture
def path():
    """Of a socket, which takes 104 characters on macOS: tests' own folders lie deeper."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder) / "socket"


def test_a_socket_left_behind_is_replaced_and_another_file_is_not(path):
    for _ in range(2):
        bound = bind(Settings(host=f"unix:{path}"))
        assert url(bound) == f"unix:{path}"
        bound.close()
    path.unlink()
    path.write_text("data")
    with pytest.raises(Ds4Error, match="cannot listen"):
        bind(Settings(host=f"unix:{path}"))


def test_a_socket_that_is_served_is_not_taken_over(path):
    settings = Settings(host=f"unix:{path}")
    with bind(settings) as first:
        first.listen()
        with pytest.raises(Ds4Error, match="in use"):
            bind(settings)
        assert path.is_socket()


@pytest.mark.parametrize("host", ["unix:", "a" * 300 + ".x"])
def test_a_host_that_can_be_no_address_is_one_clear_error(host):
    with pytest.raises(Ds4Error, match="cannot listen on .* choose another"):
        bind(Settings(host=host, port=0))


def test_ipv6_addresses_are_written_in_brackets():
    try:
        bound = bind(Settings(host="::1", port=0))
    except Ds4Error:
        pytest.skip("this machine has no IPv6")
    with bound:
        assert url(bound) == f"http://[::1]:{bound.getsockname()[1]}" and bound.family == socket.AF_INET6


def test_a_connection_that_its_client_closed_is_closed_here(serve):
    server = serve()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n")
        read_until(connection, b'"ds4mlx"')
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536) == b""     # at once, and not when it has been idle for 75 s


@pytest.mark.parametrize("_again", range(5))    # one in two shows it
def test_connections_made_while_it_stops_are_closed_too(_again, start_server, stop_server):
    server, connections, stopped = start_server(), [], threading.Event()
    host, port = server.url.removeprefix("http://").split(":")

    def connect_on():
        with contextlib.suppress(OSError):      # no longer served
            while not stopped.is_set():
                connections.append(socket.create_connection((host, int(port)), timeout=60))

    threads = [threading.Thread(target=connect_on) for _ in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: len(connections) > 50)
    stop_server(server)
    stopped.set()
    for thread in threads:
        thread.join()
    for connection in connections:
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"G")    # one that found the kernel's queue full was never there, and hears it only then
            assert connection.recv(1) == b""     # it does not wait for what nobody will send
