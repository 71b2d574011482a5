"""Silence, clients that leave, queues and shutdown: what happens around an answer while it is computed."""
import asyncio
import threading

import pytest
from waiting import idle, read_until, until

from ds4mlx.chat.events import Finish
from ds4mlx.chat.messages import Conversation, Message, TextPart
from ds4mlx.engine.protocol import Sampling
from ds4mlx.engine.stub import Gate
from ds4mlx.service.turn import Turn


def test_keepalives_come_while_the_engine_thread_is_blocked_in_prefill(serve, connect):
    server, gate = serve(settings={"sse_keepalive_seconds": 0.02}), Gate()
    server.stub.before_prefill = gate
    client = connect(server, stream=True)
    seen = read_until(client, b": keepalive 0/12\n\n")
    assert b'"role":"assistant"' in seen and b"text/event-stream" in seen
    assert b'"delta":{}' in seen + read_until(client, b'"delta":{}')  # every third one, for those that skip comments
    gate.opened.set()
    assert b"[DONE]" in read_until(client, b"[DONE]")


def test_keepalives_come_between_two_slow_tokens(serve, connect):
    server, gate = serve(settings={"sse_keepalive_seconds": 0.02}), Gate()
    server.stub.before_decode = gate
    client = connect(server, stream=True)
    read_until(client, b": keepalive 12/12\n\n")
    gate.opened.set()
    read_until(client, b"[DONE]")


def test_a_keepalive_of_zero_seconds_is_none(serve, connect):
    server, gate = serve(settings={"sse_keepalive_seconds": 0}), Gate()
    server.stub.before_decode = gate
    client = connect(server, stream=True)
    assert gate.reached.wait(60)
    gate.opened.set()
    assert b": keepalive" not in read_until(client, b"[DONE]")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["before_prefill", "before_decode"])
def test_a_client_that_leaves_frees_the_slot_and_leaves_its_prefix(serve, connect, phase, stream):
    server, gate = serve("x" * 3000, settings={"prefill_chunk": 8}), Gate()
    setattr(server.stub, phase, gate)
    client = connect(server, stream=stream)
    assert gate.reached.wait(60)
    answer, = server.service.scheduler.requests
    client.close()
    until(lambda: answer.given_up)
    gate.opened.set()
    until(lambda: idle(server))
    assert server.stub.slices == ([8] if phase == "before_prefill" else [8, 2, 2])  # the last: its header
    usage = server.chat("Hi there", max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (8 if phase == "before_prefill" else 12)


def test_a_client_that_leaves_the_queue_is_never_computed(serve, connect):
    server, gate = serve(), Gate()
    server.stub.before_prefill = gate
    first, second = connect(server, stream=True), None
    assert gate.reached.wait(60)
    second = connect(server, stream=True)
    read_until(second, b'"role"')
    second.close()
    until(lambda: not server.service.health.queued)
    gate.opened.set()
    read_until(first, b"[DONE]")
    until(lambda: idle(server))
    assert sum(server.stub.slices) == 13  # one prompt and the end of its answer, not two prompts


def test_a_full_queue_answers_429_with_retry_after(serve, connect):
    server, gate = serve(settings={"max_queue": 1}), Gate()
    server.stub.before_prefill = gate
    waiting = [connect(server, stream=True) for _ in range(2)]
    for client in waiting:
        read_until(client, b'"role"')
    refused = server.post(json={"messages": [{"role": "user", "content": "Hi"}], "stream": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "5"
    gate.opened.set()
    for client in waiting:
        read_until(client, b"[DONE]")


def test_a_client_that_reads_nothing_is_dropped(serve, connect):
    # Twenty alternatives a token make chunks of 2 kB: a few thousand of them fill the buffers of both sockets.
    server = serve("x" * 90_000, settings={"send_stall_timeout": 0.3, "ctx": 100_000})
    client = connect(server, stream=True, logprobs=True, top_logprobs=20, max_tokens=90_000)
    read_until(client, b'"role"')
    until(lambda: idle(server))
    assert server.chat(max_tokens=1)["usage"]["completion_tokens"] == 1


def test_an_answer_that_is_read_too_slowly_ends_in_an_error_and_not_as_if_complete(serve, monkeypatch):
    monkeypatch.setattr("ds4mlx.service.mailbox.LIMIT_BYTES", 1000)   # a dozen tokens, not sixteen thousand
    server = serve("x" * 2000, settings={"send_stall_timeout": 0.1})
    turn = Turn(Conversation((Message("user", (TextPart("Hi"),)),), thinking=False), Sampling())

    def on_loop(work):
        return asyncio.run_coroutine_threadsafe(work, server.loop).result()

    answer = on_loop(server.service.run(turn))
    until(lambda: idle(server))  # the mailbox is full of what nobody took
    events = on_loop(answer.batch())
    end = events[-1] if isinstance(events[-1], Finish) else on_loop(answer.batch())[-1]
    assert (end.reason, end.error_code) == ("error", "slow_reader") and "too slowly" in end.error


def test_at_shutdown_the_active_answer_ends_and_the_queued_is_refused(serve, connect):
    server, gate = serve(), Gate()
    server.stub.before_decode = gate
    active = connect(server, stream=True)
    assert gate.reached.wait(60)
    queued = connect(server, stream=True)
    read_until(queued, b'"role"')
    closing = threading.Thread(target=server.service.scheduler.close, args=(10,))
    closing.start()
    assert b"shutting_down" in read_until(queued, b"[DONE]")
    assert server.client.get("/health").status_code == 503
    refused = server.post(json={"messages": [{"role": "user", "content": "Hi"}]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    gate.opened.set()
    assert b'"finish_reason":"stop"' in read_until(active, b"[DONE]")
    closing.join()
