"""A line between a browser and a server that a test can cut, and mend with another server at its end."""
import socket
import threading
from contextlib import suppress


class Line:
    """Listens on a port of 127.0.0.1 and passes bytes on to `server`'s, both ways, until it is cut."""

    def __init__(self, server):
        self._ends = []
        self.port = 0
        self.mend(server)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def mend(self, server):
        self._target = int(server.url.rsplit(":", 1)[1])
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self):
        """All connections break, and new ones are refused."""
        ends, self._ends = [self._listener, *self._ends], []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
