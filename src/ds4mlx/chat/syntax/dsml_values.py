"""Parameter bodies of DSML -> fragments of JSON text, as they come where that is possible."""
import json
import re
from typing import Protocol

from ds4mlx.chat.syntax.base import Region, spelled
from ds4mlx.chat.syntax.dsml_tags import decode_entities, partial_entity

MAX_JSON_DEPTH = 128  # of one value; deeper ones are passed on as a string, which every client can read

_NOTABLE = re.compile(r'["\\{}\[\]]')


class Value(Protocol):
    region: Region  # of the next character

    def feed(self, text: str) -> str:
        """Takes a piece of the body; returns the JSON text that it completes."""
        ...

    def end(self) -> str:
        """The rest of the JSON text."""
        ...


def string_piece(text: str) -> str:
    """Text inside the quotes of a JSON string. Pieces may be cut anywhere between characters."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StringValue:
    """Raw text with entities -> a JSON string, streamed."""
    region = Region.STRING_BODY

    def __init__(self) -> None:
        self._held = ""  # the start of what may be an entity, at most 5 characters
        self._opening = '"'

    def feed(self, text: str) -> str:
        text = self._held + spelled(text)
        ready = len(text) - partial_entity(text)
        self._held = text[ready:]
        opening, self._opening = self._opening, ""
        return opening + string_piece(decode_entities(text[:ready]))

    def end(self) -> str:
        return self._opening + string_piece(self._held) + '"'


class JsonValue:
    """JSON text, checked when it is complete; what is no JSON becomes a string."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = self._deepest = 0
        self._escape = False  # the next character is escaped
        self.region = Region.JSON_STRUCTURE

    def feed(self, text: str) -> str:
        self._pieces.append(text)
        position = 1 if self._escape and text else 0
        self._escape = self._escape and not text
        while match := _NOTABLE.search(text, position):
            position = match.end()
            if self.region is Region.JSON_STRING and match[0] == "\\":
                self._escape = position == len(text)
                position += 1
            else:
                self._pass(match[0])
        return ""

    def _pass(self, character: str) -> None:
        if character == '"':
            inside = self.region is Region.JSON_STRING
            self.region = Region.JSON_STRUCTURE if inside else Region.JSON_STRING
        elif self.region is Region.JSON_STRUCTURE and character != "\\":
            self._depth += 1 if character in "[{" else -1
            self._deepest = max(self._deepest, self._depth)

    def end(self) -> str:
        text = spelled("".join(self._pieces))
        try:
            if self._deepest <= MAX_JSON_DEPTH:
                json.loads(text, parse_constant=_refuse)
                return text
        except ValueError:
            pass
        return '"' + string_piece(decode_entities(text)) + '"'


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
