"""A server of files that behaves as badly as a test asks, on a free port of 127.0.0.1."""
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple


class Request(NamedTuple):
    method: str
    start: int                  # first byte asked for
    authorization: str | None
    command_lines: str          # of all processes at that moment


class Server(ThreadingHTTPServer):
    """`files` by name. The rest is what goes wrong; nothing does at first."""
    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests = files, []
        self.ranges = True              # False: every answer is the whole file
        self.drop_after = None          # bytes of an answer after which the connection breaks
        self.hold_after = None          # bytes of an answer after which it waits for `release`
        self.released = threading.Event()
        self.held = threading.Event()
        self.fail_first = 0             # answers that are 503
        self.secret = None              # refuse who does not show it
        self.elsewhere = None           # where to send everybody
        self.announced = {}             # lengths that HEAD lies about, by name

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def starts(self):
        """The first byte of each answer that was begun."""
        return [request.start for request in self.requests if request.method == "GET"]

    def handle_error(self, request, client_address):
        pass    # clients that are killed


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        server, name = self.server, self.path.rpartition("/")[2]
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes="):-1]) if server.ranges else 0
        authorization = self.headers.get("Authorization")
        server.requests.append(Request(self.command, start, authorization, command_lines()))
        if server.elsewhere:
            return self.send(302, Location=f"{server.elsewhere}/{name}")
        if server.secret and authorization != f"Bearer {server.secret}":
            return self.send(401)
        if server.fail_first and self.command == "GET":
            server.fail_first -= 1
            return self.send(503)
        if name not in server.files:
            return self.send(404)
        content = server.files[name]
        if start >= len(content):
            return self.send(416)
        length = server.announced.get(name, len(content)) if self.command == "HEAD" else len(content) - start
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "GET":
            self.body(content[start:])

    def body(self, content):
        server = self.server
        if server.hold_after is not None:
            self.wfile.write(content[:server.hold_after])
            server.held.set()
            server.released.wait(60)
        elif server.drop_after is not None:
            self.wfile.write(content[:server.drop_after])
        else:
            self.wfile.write(content)

    def send(self, status, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_):
        pass


def command_lines():
    """What anybody on this machine can read of the arguments of processes; empty where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            pass
    return "\n".join(found)


@contextmanager
def serving(files):
    with Server(files) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
