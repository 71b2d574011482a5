"""Many requests at once, cut at some moment or refused: the rest are answered right, and nothing is left behind."""
import asyncio
import gc
import json
import os
import random
import socket
import threading
import time

from ds4mlx.engine.stub import Gate
from ds4mlx.service.answer import Answer

STREAMS = 200


def request(number):
    body = json.dumps({"messages": [{"role": "user", "content": f"question {number}"}], "thinking": False,
                       "stream": True}).encode()
    return (b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)) + body


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def read(where, number, cut_after, results):
    """Read a stream to its end, or leave it after so many bytes."""
    data = b""
    with socket.create_connection(where, timeout=60) as connection:
        connection.sendall(request(number))
        while cut_after is None or len(data) < cut_after:
            piece = connection.recv(4096)
            if not piece:
                break
            data += piece
    results[number] = data


def text(stream):
    lines = [line for line in stream.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines)


def left_behind(server):
    """Tasks, open files and unfinished answers of this process."""
    tasks = asyncio.run_coroutine_threadsafe(_tasks(), server.loop).result(10)
    gc.collect()
    answers = sum(isinstance(found, Answer) for found in gc.get_objects())
    return tasks, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0, answers


async def _tasks():
    return len(asyncio.all_tasks())


def test_half_of_200_streams_are_cut_and_the_rest_are_right(serve):
    server, results = serve("An answer of some length, the same for all."), {}
    read(address(server), 0, None, results)
    before, draw = left_behind(server), random.Random(7)
    cuts = [draw.randrange(1, 4000) if n % 2 else None for n in range(STREAMS)]
    threads = [threading.Thread(target=read, args=(address(server), n, cut, results)) for n, cut in enumerate(cuts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    whole = {text(results[n]) for n, cut in enumerate(cuts) if cut is None}
    assert len(results) == STREAMS and whole == {"An answer of some length, the same for all."}
    nothing_is_left(server, before)


def test_of_a_thousand_requests_ten_wait_and_the_rest_are_told_when_to_come_again(serve):
    server, gate = serve("An answer.", settings={"max_queue": 10}), Gate()
    read(address(server), 0, None, {})
    before, server.stub.before_prefill = left_behind(server), gate
    asked = [socket.create_connection(address(server), timeout=60) for _ in range(11)]
    for number, connection in enumerate(asked):
        connection.sendall(request(number))
        assert connection.recv(12) == b"HTTP/1.1 200"
    results = {}
    for number in range(989):
        read(address(server), number, None, results)
    assert all(b" 429 " in told and b"retry-after: 5" in told for told in results.values())
    gate.opened.set()
    assert all(ends_whole(connection) for connection in asked)
    nothing_is_left(server, before)


def ends_whole(connection):
    with connection, connection.makefile("rb") as stream:
        return text(stream.read()) == "An answer."


def nothing_is_left(server, before):
    deadline = time.monotonic() + 60
    while (left := left_behind(server)) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(now <= then for now, then in zip(left, before, strict=True)) and not server.service.health.active
