"""One DSML tag read from pieces: blanks, "<", the tag's head, attributes in any order and any quotes, ">"."""
import re
from dataclasses import dataclass

from ds4mlx.chat.syntax.base import BLANKS, spelled

MAX_TAG = 4096  # characters; names are far shorter, and a tag without end should not be collected forever

_NOT_BLANK = re.compile(f"[^{BLANKS}]")
_NOTABLE = re.compile("[<>\"'“”‘’]")
_CLOSES = {'"': '"', "'": "'", "“": "“”", "”": "“”", "‘": "‘’", "’": "‘’"}  # opening quote -> what may end it
_QUOTED = """"[^"]*"|'[^']*'|[“”][^“”]*[“”]|[‘’][^‘’]*[‘’]"""
_ATTRIBUTE = re.compile(rf"[{BLANKS}]+([\w.:-]+)[{BLANKS}]*=[{BLANKS}]*({_QUOTED})")
_ENTITY = re.compile("&(?:amp|lt|gt|quot|apos);")
_PARTIAL_ENTITY = re.compile(r"&(?:a|am|amp|ap|apo|apos|l|lt|g|gt|q|qu|quo|quot)?\Z")
_CHARACTERS = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}


def decode_entities(text: str) -> str:
    """Decodes the five entities of XML, and nothing else."""
    return _ENTITY.sub(lambda entity: _CHARACTERS[entity.group()], text)


def partial_entity(text: str) -> int:
    """Length of the end of `text` that may become an entity."""
    match = _PARTIAL_ENTITY.search(text, max(0, len(text) - 5))
    return len(text) - match.start() if match else 0


@dataclass(frozen=True, slots=True)
class Tag:
    head: str                    # as "<｜DSML｜invoke" or "</｜DSML｜invoke", as marks
    attributes: dict[str, str]   # decoded; of a repeated attribute the first


class TagReader:
    """Reads one tag: `tag` is set when it is complete, `failed` when none can come of the text.

    A "<" inside a tag is never accepted (attributes are written with "&lt;"), so that a tag which
    fails can be read again as text, and markers in it be found, without reading anything twice more.
    """

    def __init__(self, head: str = "") -> None:
        """With `head`, from right after it on; else from the blanks before the tag."""
        self._pieces = [head]
        self._start = head  # the tag up to its head
        self._head = head   # once that is complete
        self._quote = ""    # quotes that may end the open attribute value
        self._length = 0    # of what follows the head
        self.tag: Tag | None = None
        self.failed = False

    @property
    def text(self) -> str:
        """Blanks and tag as far as they are read."""
        return "".join(self._pieces)

    def feed(self, text: str, position: int, heads: tuple[str, ...]) -> int:
        """Reads from `position` towards the end of one tag with one of `heads`; returns the position reached."""
        if not self._start:
            found = _NOT_BLANK.search(text, position)
            at = found.start() if found else len(text)
            self._take(text[position:at])
            if not found:
                return at
            position = at
        while not self._head and not self.failed and position < len(text):
            self._read_head(text[position], heads)
            position += 1
        while self.tag is None and not self.failed and position < len(text):
            position = self._read_attributes(text, position)
        return position

    def _take(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _read_head(self, character: str, heads: tuple[str, ...]) -> None:
        self._take(character)
        self._start += character
        if self._start in heads:
            self._head = self._start
        self.failed = not any(head.startswith(self._start) for head in heads)

    def _read_attributes(self, text: str, position: int) -> int:
        found = _NOTABLE.search(text, position)
        end = min(found.end() if found else len(text), position + MAX_TAG - self._length)
        self._length += end - position
        self._take(text[position:end])
        if found and end == found.end():
            self._read_notable(text[end - 1])
        self.failed = self.failed or (self._length >= MAX_TAG and self.tag is None)
        return end

    def _read_notable(self, character: str) -> None:
        if character == "<":
            self.failed = True
        elif self._quote:
            self._quote = "" if character in self._quote else self._quote
        elif character == ">":
            self._finish()
        else:
            self._quote = _CLOSES[character]

    def _finish(self) -> None:
        source = self.text.lstrip(BLANKS)[len(self._head):-1].rstrip(BLANKS)
        attributes: dict[str, str] = {}
        position = 0
        while match := _ATTRIBUTE.match(source, position):
            attributes.setdefault(match[1], decode_entities(spelled(match[2][1:-1])))
            position = match.end()
        if position < len(source) or (attributes and self._head.startswith("</")):
            self.failed = True
        else:
            self.tag = Tag(self._head, attributes)
