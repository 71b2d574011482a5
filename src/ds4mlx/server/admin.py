"""Everything about the server itself: its health, its requests, its models."""
import asyncio
import time
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.chat.messages import Json
from ds4mlx.errors import BadRequest
from ds4mlx.server.controls import MODEL, model_names
from ds4mlx.server.errors import Line
from ds4mlx.service.requests import Known
from ds4mlx.service.service import Service

CREATED, CREATED_AT = 1767225600, "2026-01-01T00:00:00Z"
PARAMETERS = ("tools", "tool_choice", "parallel_tool_calls", "max_tokens", "temperature", "top_p", "top_k", "min_p",
              "stop", "seed", "stream", "reasoning_effort", "response_format", "logprobs", "logit_bias",
              "presence_penalty", "frequency_penalty")


async def health(request: Request) -> Response:
    """200 when requests are taken, 503 otherwise. Never waits for the engine; the cache's files are looked at aside."""
    service: Service = request.app.state.service
    now, store = service.health, service.scheduler.store
    kept = await asyncio.to_thread(store.stats) if store is not None else None
    content = {"status": now.state, "model": MODEL, "uptime_s": round(time.monotonic() - request.app.state.began, 1),
               "context_length": service.context, "slots": now.slots, "active": now.active, "queued": now.queued,
               "kv_cache": {"enabled": kept is not None, "bytes": kept.total_bytes if kept else 0,
                            "budget_bytes": kept.budget_bytes if kept else 0,
                            "files": kept.heads + kept.segments if kept else 0}}
    return Line(content, status_code=200 if now.state == "ok" else 503)


async def list_requests(request: Request) -> Response:
    """Those that run and those that wait, and those that ended last, by the ids that their responses carry as
    x-request-id: what each went on from, and why from no more. Nobody's words."""
    service: Service = request.app.state.service
    return Line({"requests": [_told(known) for known in service.requests()],
                 "ended": [_told(known) for known in service.metrics.recent]})


def _told(known: Known) -> dict[str, Json]:
    """ago_s: seconds since it was so, which a clock elsewhere can make use of."""
    told = asdict(known)
    return told | {"ago_s": round(max(0.0, time.monotonic() - told.pop("at")), 1)}


async def cancel_request(request: Request) -> Response:
    id, service = request.path_params["id"], request.app.state.service
    if not service.cancel(id):
        raise BadRequest(f"no request {id[:80]!r} waits or runs here; GET /admin/requests lists those that do",
                         code="not_found", status=404)
    return Line({"id": id, "cancelled": True})


async def list_models(request: Request) -> Response:
    """One object that both the OpenAI and the Anthropic clients can read."""
    cards = [_card(name, request.app.state.service) for name in (MODEL, *_served(request))]
    return Line({"object": "list", "data": cards, "has_more": False, "first_id": cards[0]["id"],
                 "last_id": cards[-1]["id"]})


async def one_model(request: Request) -> Response:
    name, service = request.path_params["id"], request.app.state.service
    if name not in model_names(service.settings):
        raise BadRequest(f"model {name!r} is not served here; known are {', '.join(model_names(service.settings))}",
                         param="model", code="model_not_found", status=404)
    return Line(_card(name, service))


def _served(request: Request) -> tuple[str, ...]:
    return request.app.state.service.settings.served_model_name


def _card(name: str, service: Service) -> dict[str, Json]:
    context, tokens = service.context, service.settings.tokens
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "ds4mlx", "name": service.info.name,
            "context_length": context,
            "top_provider": {"context_length": context, "is_moderated": False,
                             "max_completion_tokens": min(tokens, context)},
            "supported_parameters": list(PARAMETERS),
            "type": "model", "display_name": service.info.name, "created_at": CREATED_AT}


routes = [
    *(Route(path, health, methods=["GET"]) for path in ("/health", "/healthz", "/v1/health")),
    Route("/admin/requests", list_requests, methods=["GET"]),
    Route("/admin/requests/{id}/cancel", cancel_request, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", one_model, methods=["GET"]),
]
