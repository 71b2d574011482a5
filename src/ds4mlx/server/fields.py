"""Reading members of a JSON body: each has a type and a range, and an error says which member broke what."""
from collections.abc import Iterator, Sequence

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.json_text import Number
from ds4mlx.chat.messages import Json
from ds4mlx.errors import BadRequest

_KINDS = {bool: "a boolean", int: "an integer", float: "a number", Number: "a number", str: "a string",
          list: "an array", dict: "an object", type(None): "null"}


MEDIA = ("image", "document", "file", "audio", "video")   # in names of types of parts


def unsupported(kind: str) -> str:
    """What stands in a tool's result for a part that is not text: the words of the model's own encoder."""
    return f"[Unsupported {kind[:80]}]"


def found(value: Json) -> str:
    """What a value is, for an error: its kind, and the value itself where it is short."""
    shown = repr(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    kind = _KINDS.get(type(value)) or f"a {type(value).__name__}, which is not JSON"    # of who writes Python
    return f"{kind} ({shown})" if 0 < len(shown) <= 40 else kind


class Fields:
    """One JSON object. `path` is where it stands in the body; null counts as absent everywhere.

    Every reader raises BadRequest naming the member when its value is of another type or out of range.
    """

    def __init__(self, members: dict[str, Json], path: str = "") -> None:
        self.members, self.path = members, path

    @classmethod
    def of(cls, value: Json, path: str) -> "Fields":
        if not isinstance(value, dict):
            raise BadRequest(f"{path} is {found(value)}, need an object", param=path)
        return cls(value, path)

    def name(self, member: str) -> str:
        return f"{self.path}.{member}" if self.path else member

    def error(self, member: str, needed: str, *, code: str | None = None) -> BadRequest:
        name, value = self.name(member), self.members.get(member)
        if value is None:
            return BadRequest(f"{name} is missing, need {needed}", param=name, code=code)
        return BadRequest(f"{name} is {found(value)}, need {needed}", param=name, code=code)

    def unreadable(self, kind: str, needed: str, param: str | None = None) -> BadRequest:
        """This is a part of a message, of a type that the model cannot be shown."""
        advice = f", need {needed}; leave it out"
        if any(word in kind for word in MEDIA):
            advice = ("; this model reads text only: describe it in words, and go back to before the message that "
                      "holds it, or every later request of the conversation is refused as well")
        return BadRequest(f"{self.path} is of type {kind[:80]!r}{advice}", param=param or self.path)

    def get(self, member: str) -> Json:
        return self.members.get(member)

    def string(self, member: str) -> str | None:
        """Text, lone surrogates replaced."""
        value = self.members.get(member)
        if value is not None and not isinstance(value, str):
            raise self.error(member, "a string")
        return None if value is None else clean_text(value)

    def required_string(self, member: str) -> str:
        value = self.string(member)
        if not value:
            raise self.error(member, "a non-empty string")
        return value

    def boolean(self, member: str) -> bool | None:
        value = self.members.get(member)
        if value is not None and not isinstance(value, bool):
            raise self.error(member, "true or false")
        return value

    def number(self, member: str, low: float, high: float) -> float | None:
        value = self.members.get(member)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(member, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, member: str, low: int | None = None, high: int | None = None) -> int | None:
        """A whole number; `5.0` is one."""
        value = self.members.get(member)
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        whole = whole or isinstance(value, float) and value.is_integer()
        if not whole or (low is not None and value < low) or (high is not None and value > high):
            limits = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
            raise self.error(member, f"an integer{limits}")
        return int(value)

    def choice(self, member: str, options: Sequence[str]) -> str | None:
        value = self.string(member)
        if value is not None and value not in options:
            raise self.error(member, f"one of {', '.join(options)}")
        return value

    def object(self, member: str) -> "Fields | None":
        value = self.members.get(member)
        return None if value is None else Fields.of(value, self.name(member))

    def array(self, member: str) -> list[Json] | None:
        value = self.members.get(member)
        if value is not None and not isinstance(value, list):
            raise self.error(member, "an array")
        return value

    def objects(self, member: str) -> Iterator["Fields"]:
        """The objects of an array; none when it is absent."""
        for i, value in enumerate(self.array(member) or ()):
            yield Fields.of(value, f"{self.name(member)}[{i}]")
