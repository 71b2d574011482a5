"""The web application: routes of all APIs, and what holds for every request before and after them."""
import asyncio
import hmac
import ipaddress
import logging
import secrets
import socket
import time
import traceback

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.server import admin, anthropic, diagnostics, openai_chat, openai_completions, openai_responses, statistics
from ds4mlx.server.errors import error_response
from ds4mlx.server.page import route as page
from ds4mlx.server.responses_store import ResponseStore
from ds4mlx.service.scheduler import refusal
from ds4mlx.service.service import Service

log = logging.getLogger(__name__)

ROUTES = [*openai_chat.routes, *openai_completions.routes, *openai_responses.routes, *anthropic.routes, *admin.routes,
          *statistics.routes, *page.routes]
DISCARD_S = 1.0
SILENCE_S = 9.0  # within a body; less than the server gives open connections when it stops
MAX_HEADER_BYTES = 64 << 10
OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/v1/health"})
METRICS = "/metrics"  # open unless protected: a scraper has no key
CORS_HEADERS = {"access-control-allow-origin": "*", "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
                "access-control-expose-headers": "x-request-id, x-ds4mlx-cache-source"}


def create_app(service: Service, settings: Settings) -> Starlette:
    """The application over a service; starting and closing the service is the caller's business."""
    routes = [*ROUTES, *diagnostics.routes] if settings.diagnostics else ROUTES
    app = Starlette(routes=routes, middleware=[Middleware(Gate, settings=settings, service=service)],
                    exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    app.state.service, app.state.began = service, time.monotonic()
    app.state.responses = ResponseStore(settings.responses_store)
    return app


class Gate:
    """Around every request: its id, the host guard, the key, CORS, and errors in the shape of the API.

    While the model loads, only health is told; all else is put off.
    """

    def __init__(self, app: ASGIApp, settings: Settings, service: Service) -> None:
        self.app, self.settings, self.service = app, settings, service
        self.guards_host = is_loopback(settings.host)
        self.open_paths = OPEN_PATHS | (frozenset() if settings.protect_metrics else {METRICS})
        self.known_hosts = {"localhost", *map(str.lower, settings.allow_host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(receive, scope)
        reply = _Reply(send, self._extra_headers(scope), body)
        scope.setdefault("state", {})["request_id"] = reply.headers["x-request-id"]
        scope["path"] = path = scope["path"].rstrip("/") or "/"
        fault: BadRequest | None = None
        try:
            _guard_size(scope)
            self._guard_host(scope)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204)(scope, body, reply)
                return
            self._guard_key(scope)
            if path not in OPEN_PATHS | {METRICS} and self.service.health.state == "loading":
                raise refusal("loading")
            await self.app(scope, body, reply)
        except BadRequest as refused:
            fault = refused
        except ClientDisconnect:
            return
        except Exception as broken:  # the outermost place: one broken request, not a broken server
            # Where it broke, but not the exception's text, which may quote the prompt; %r: a path may hold line breaks.
            log.error("a request failed: %s %r: %s\n%s", scope["method"], path, type(broken).__name__,
                      "".join(traceback.format_tb(broken.__traceback__)))
            fault = BadRequest("internal error; see the server's log", code="internal_error", status=500)
        if fault is not None and not reply.started:
            self.service.metrics.refused(fault.status)
            await error_response(path, fault, scope["state"]["request_id"])(scope, body, reply)

    def _extra_headers(self, scope: Scope) -> dict[str, str]:
        headers = {"x-request-id": "req_" + secrets.token_hex(12)}
        if scope["path"].startswith("/v1/messages"):  # where Anthropic's clients look for it
            headers["request-id"] = headers["x-request-id"]
        if self.settings.cors:
            # A browser does not take "*" as covering Authorization, so what it asks for is echoed.
            asked = Headers(scope=scope).get("access-control-request-headers", "*")
            headers |= CORS_HEADERS | {"access-control-allow-headers": asked}
        return headers

    def _guard_host(self, scope: Scope) -> None:
        """On a loopback address, only names that lead there: a web page must not reach it through a name of its own."""
        host = _hostname(Headers(scope=scope).get("host", ""))
        if self.guards_host and host and host not in self.known_hosts and not _is_ip(host):
            raise BadRequest(f"Host is {host[:80]!r}, need localhost, an IP address or a name given with --allow-host",
                             status=403)

    def _guard_key(self, scope: Scope) -> None:
        key, path = self.settings.api_key, scope["path"]
        if key is None or path in self.open_paths:
            return
        headers = Headers(scope=scope)
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise BadRequest("the API key is missing or wrong; send Authorization: Bearer KEY or x-api-key: KEY",
                             code="invalid_api_key", status=401)


class _Body:
    """`receive` that knows whether parts of the request are still on their way."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self.receive = receive
        self.pending = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self.shares_connection = scope["http_version"] == "2"

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(SILENCE_S if self.pending else None):
                return await self._next()
        except TimeoutError:
            raise BadRequest(f"nothing of the body came for {SILENCE_S:g} s; send the request again", code="timeout",
                             status=408) from None

    async def discard(self) -> None:
        """Read what is still coming, for a moment: a client that is sending does not look for an answer."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while self.pending:
                    await self._next()
        except TimeoutError:
            pass

    async def _next(self) -> Message:
        message = await self.receive()
        if not message.get("more_body", False):
            self.pending = False
        return message


class _Reply:
    """`send` that adds headers and remembers whether the response has begun.

    A request that is refused before it was read to its end is read first. If it is too long for that, the response is
    the connection's last and says so, or the client would send its next request into a closed connection.
    """

    def __init__(self, send: Send, headers: dict[str, str], body: _Body) -> None:
        self.send, self.headers, self.body, self.started = send, headers, body, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            await self.body.discard()
            headers = MutableHeaders(scope=message)
            headers.update(self.headers)
            if self.body.pending and not self.body.shares_connection:
                headers["connection"] = "close"
        await self.send(message)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such route, or not with this method."""
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        fault = BadRequest(f"{request.method} is not possible on {path}, need {allowed}", code="method_not_allowed",
                           status=405)
        response = error_response(path, fault, request.state.request_id)
        response.headers["allow"] = allowed
        return response
    if path.startswith("/v1/v1/"):
        hint = "the base URL ends in /v1 and the client adds another; drop one /v1"
    else:
        hint = "known are " + ", ".join(sorted({f"{route.path}" for route in ROUTES}))
    fault = BadRequest(f"nothing at {path}; {hint}", code="not_found", status=404)
    return error_response(path, fault, request.state.request_id)


def _guard_size(scope: Scope) -> None:
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEADER_BYTES:
        raise BadRequest(f"the headers have {size} bytes, {MAX_HEADER_BYTES} are allowed", status=431)


def _hostname(host: str) -> str:
    """A Host header without its port, in lower case; IPv6 addresses without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(bind: str) -> bool:
    """Whether what listens on this address, or on a name for it, can be reached from this machine alone."""
    try:
        found = socket.getaddrinfo(bind, None, socket.AF_INET6 if ":" in bind else socket.AF_INET)
    except (OSError, UnicodeError):
        return False  # a path, or nothing to listen on
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
