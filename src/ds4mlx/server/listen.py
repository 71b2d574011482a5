"""Serving the application on a socket, with Hypercorn on the running event loop."""
import asyncio
import logging
import os
import socket
import stat

from hypercorn.asyncio import run, serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from starlette.applications import Starlette

from ds4mlx.config import Settings
from ds4mlx.errors import Ds4Error

TURNS_TO_OPEN = 4   # of the event loop: accepted, transport, protocol, task


def bind(settings: Settings) -> socket.socket:
    """A socket bound to `host` and `port`, not listening yet. Raises Ds4Error when that is impossible."""
    path = settings.host.removeprefix("unix:")
    try:
        if path != settings.host:
            return _bind_unix(path)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            bound.bind((settings.host, settings.port))
        except BaseException:
            bound.close()
            raise
        return bound
    except (OSError, ValueError) as fault:
        place = settings.host if path != settings.host else f"{settings.host}:{settings.port}"
        raise Ds4Error(f"cannot listen on {place} ({fault}); choose another --host or --port") from fault


def _bind_unix(path: str) -> socket.socket:
    """A socket that an earlier run left behind is replaced; one that is served, and any other file, is not."""
    if not path:
        raise ValueError("a path is needed after unix:")
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and not _is_served(path):
        os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    return bound


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:  # too busy to answer, or not ours to ask
            pass
    return True


def url(bound: socket.socket) -> str:
    """Where clients find the server."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def listen(app: Starlette, settings: Settings, bound: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then give open connections ten seconds. Takes the socket over."""
    config, accepting = Config(), bound.detach()
    config.bind = [f"fd://{accepting}"]
    config.workers = 1  # one process owns the model
    config.keep_alive_timeout = 75.0
    config.graceful_timeout = 10.0
    config.h11_max_incomplete_size = 64 << 10
    config.include_server_header = False
    logging.getLogger("hypercorn.error").setLevel(logging.WARNING)  # the caller tells where the server is
    config.errorlog = logging.getLogger("hypercorn.error")
    config.accesslog = logging.getLogger("hypercorn.access") if settings.access_log else None
    run.TCPServer = _Connection
    await serve(app, config, shutdown_trigger=lambda: _no_more(accepting, stop))


async def _no_more(accepting: int, stop: asyncio.Event) -> None:
    """Wait for `stop`, then let every connection that was accepted become a task: Hypercorn waits for tasks alone, and
    asyncio forgets the connections that it is still opening when a listening socket closes, which stay open."""
    await stop.wait()
    asyncio.get_running_loop().remove_reader(accepting)
    for _ in range(TURNS_TO_OPEN):
        await asyncio.sleep(0)


class _Connection(TCPServer):
    """Ends when its client closes it. Hypercorn's own keeps the socket of an idle one for the whole time-out of 75 s:
    clients that open a connection for each request take more files in that time than macOS gives a process."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()
