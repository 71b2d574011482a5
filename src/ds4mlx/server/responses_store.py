"""Responses that later requests may refer to by id: a bounded number of them, in memory only."""
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Json
from ds4mlx.server.body import parse_object

MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """A response as it was sent, and the conversation up to its end. The parts that an earlier response had are shared
    with it: as text, they take a quarter of the memory that objects would."""
    response: bytes
    history: tuple[bytes, ...]
    own_bytes: int


class ResponseStore:
    """The last responses, `most` of them, and no more than `max_bytes` of text. Any thread may call."""

    def __init__(self, most: int, max_bytes: int = MAX_BYTES) -> None:
        self._most, self._max_bytes, self._bytes = most, max_bytes, 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._mutex = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._most > 0

    def keep(self, response: dict[str, Json], items: list[Json], previous: str | None = None) -> None:
        """Remember a response to `items`, which go on from the response `previous`. The oldest ones give way."""
        said, answered = (_text({"items": part}) for part in (items, response["output"]))
        text = _text(response)
        with self._mutex:
            before = self._entries[previous].history if previous in self._entries else ()
            entry = _Entry(text, (*before, said, answered), len(text) + len(said) + len(answered))
            if previous is not None and not before or entry.own_bytes > self._max_bytes or not self.enabled:
                return   # its beginning has given way meanwhile, or it has no room
            self._entries[str(response["id"])] = entry
            self._bytes += entry.own_bytes
            while len(self._entries) > self._most or self._bytes > self._max_bytes:
                self._forget(next(iter(self._entries)))

    def response(self, id: str) -> dict[str, Json] | None:
        """A response as it was sent."""
        with self._mutex:
            entry = self._entries.get(id)
        return parse_object(entry.response) if entry else None

    def history(self, id: str) -> list[Json] | None:
        """All items of the conversation that ends with a response."""
        with self._mutex:
            entry = self._entries.get(id)
            if entry is None:
                return None
            self._entries.move_to_end(id)
        return [item for text in entry.history for item in parse_object(text)["items"]]

    def item(self, id: str) -> dict[str, Json] | None:
        """An item of a stored response's output, by the item's own id."""
        with self._mutex:
            texts = [entry.response for entry in self._entries.values()]
        quoted = json.dumps(id, ensure_ascii=False).encode()
        for text in (text for text in reversed(texts) if quoted in text):
            for item in parse_object(text)["output"]:
                if item.get("id") == id:
                    return item
        return None

    def delete(self, id: str) -> bool:
        with self._mutex:
            known = id in self._entries
            if known:
                self._forget(id)
        return known

    def _forget(self, id: str) -> None:
        self._bytes -= self._entries.pop(id).own_bytes


def _text(value: Json) -> bytes:
    return spell(value).encode("utf-8", "replace")
