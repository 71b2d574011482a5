"""GET /: the page for people, one static file. What it shows, it asks the other routes for, with the key."""
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.server.errors import Line

_INLINE = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL)


async def root(request: Request) -> Response:
    """The page; name and version for programs, which ask for application/json."""
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        return Line({"name": "ds4mlx", "version": version("ds4mlx")}, headers={"vary": "accept"})
    text, policy = page()
    return Response(text, media_type="text/html", headers={
        "content-security-policy": policy, "cache-control": "no-cache", "vary": "accept",
        "referrer-policy": "no-referrer", "x-content-type-options": "nosniff",
        "cross-origin-opener-policy": "same-origin"})


@cache
def page() -> tuple[str, str]:
    """The file, and the policy under which a browser runs nothing but its own script and style, asks no other server
    and refuses to make HTML of text."""
    text = (files("ds4mlx.server.page") / "index.html").read_text("utf-8")
    digests = {kind: b64encode(sha256(inline.encode()).digest()).decode() for kind, inline in _INLINE.findall(text)}
    return text, "; ".join([
        "default-src 'none'", f"script-src 'sha256-{digests['script']}'", f"style-src 'sha256-{digests['style']}'",
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'"])


routes = [Route("/", root, methods=["GET"])]
