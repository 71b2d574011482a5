"""A chat request on a bare socket, and waiting for what another thread does without telling."""
import json
import time


def request_bytes(**fields):
    content = json.dumps({"messages": [{"role": "user", "content": "Hi there"}], "thinking": False, **fields}).encode()
    return (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(content)) + content


def read_until(connection, wanted):
    data = b""
    while wanted not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return data


def until(condition):
    """Return once `condition` holds: for what another thread does without telling. A minute means that it hangs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def idle(server):
    return server.service.health.active == server.service.health.queued == 0
