"""Errors as each API spells them. A new API adds its shape here, under the paths it serves."""
from collections.abc import Callable

from starlette.responses import JSONResponse, Response

from ds4mlx.chat.messages import Json
from ds4mlx.errors import BadRequest

Shape = Callable[[BadRequest], dict[str, Json]]

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error",
                503: "server_error", 507: "server_error"}
STATUS_OF_CODE = {"out_of_memory": 507, "shutting_down": 503, "loading": 503, "failed": 503, "slow_reader": 408}


def openai_shape(fault: BadRequest) -> dict[str, Json]:
    kind = OPENAI_TYPES.get(fault.status, "invalid_request_error")
    return {"error": {"message": str(fault), "type": kind, "param": fault.param, "code": fault.code, **fault.details}}


SHAPES: dict[str, Shape] = {}  # path prefix -> shape, where it is not OpenAI's


def error_response(path: str, fault: BadRequest) -> Response:
    """The answer that reports `fault` to a client of the API at `path`."""
    shape = next((shape for prefix, shape in SHAPES.items() if path.startswith(prefix)), openai_shape)
    headers = {"retry-after": "5"} if fault.status in (429, 503) else {}
    return Line(shape(fault), status_code=fault.status, headers=headers)


def engine_error(message: str, code: str | None) -> BadRequest:
    """What a failed answer is when no part of it was sent yet."""
    return BadRequest(message, code=code, status=STATUS_OF_CODE.get(code or "", 500))


class Line(JSONResponse):
    """JSON that ends with a newline: kind to a terminal."""

    def render(self, content: Json) -> bytes:
        return super().render(content) + b"\n"
