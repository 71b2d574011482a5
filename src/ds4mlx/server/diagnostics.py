"""POST /tokenize, on a server that was told to answer it: what becomes of a text, or of a conversation."""
import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ds4mlx.chat.messages import Json
from ds4mlx.server import exchange
from ds4mlx.server.errors import Line
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn


async def tokenize(request: Request) -> Response:
    """{"text": ...} or a chat request in; ids, the bytes of each as `ds4mlx tokens` shows them, and the text out.

    A text is text, whatever it spells. Nothing is queued or computed for a chat request, whose prompt is shown.
    """
    service: Service = request.app.state.service

    def read(body: dict[str, Json]) -> str | Turn:
        fields = Fields(body)
        text = fields.string("text")
        return read_chat(fields, service.settings).turn if text is None else text

    asked = await exchange.read(request, read)
    if isinstance(asked, Turn):
        ids, text = await service.rendered(asked)
    else:
        ids, text = await asyncio.to_thread(service.tokenizer.encode_literal, asked), asked
    return Line({"count": len(ids), "ids": ids, "pieces": service.pieces(ids), "text": text})


routes = [Route("/tokenize", tokenize, methods=["POST"])]
