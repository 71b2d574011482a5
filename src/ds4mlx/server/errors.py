"""Errors as each API spells them. A new API adds its shape here, under the paths it serves."""
from collections.abc import Callable

from starlette.responses import JSONResponse, Response

from ds4mlx.chat.messages import Json
from ds4mlx.errors import BadRequest

Shape = Callable[[BadRequest, str], dict[str, Json]]  # the fault, and the request's id where it is known

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error",
                503: "server_error", 507: "server_error"}
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                   413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
                   507: "api_error"}
STATUS_OF_CODE = {"out_of_memory": 507, "shutting_down": 503, "loading": 503, "failed": 503, "slow_reader": 408,
                  "cancelled": 409, "continuation_state_unavailable": 409, "context_length_exceeded": 400}


def openai_shape(fault: BadRequest, request_id: str = "") -> dict[str, Json]:
    kind = OPENAI_TYPES.get(fault.status, "invalid_request_error")
    return {"error": {"message": str(fault), "type": kind, "param": fault.param, "code": fault.code, **fault.details}}


def anthropic_shape(fault: BadRequest, request_id: str = "") -> dict[str, Json]:
    message, kind = str(fault), ANTHROPIC_TYPES.get(fault.status, "invalid_request_error")
    if "n_ctx" in fault.details:  # clients that shorten conversations look for these words
        message = f"prompt is too long: {fault.details['n_prompt_tokens']} tokens > {fault.details['n_ctx']} maximum"
    elif fault.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    shape: dict[str, Json] = {"type": "error", "error": {"type": kind, "message": message, **fault.details}}
    return shape | {"request_id": request_id} if request_id else shape


SHAPES: dict[str, Shape] = {"/v1/messages": anthropic_shape}  # path prefix -> shape, where it is not OpenAI's


def error_response(path: str, fault: BadRequest, request_id: str = "") -> Response:
    """The answer that reports `fault` to a client of the API at `path`."""
    shape = next((shape for prefix, shape in SHAPES.items() if path.startswith(prefix)), openai_shape)
    headers = {"retry-after": "5"} if fault.status in (429, 503) else {}
    return Line(shape(fault, request_id), status_code=fault.status, headers=headers)


def engine_error(message: str, code: str | None) -> BadRequest:
    """What a failed answer is when no part of it was sent yet."""
    return BadRequest(message, code=code, status=STATUS_OF_CODE.get(code or "", 500))


class Line(JSONResponse):
    """JSON that ends with a newline: kind to a terminal."""

    def render(self, content: Json) -> bytes:
        return super().render(content) + b"\n"
