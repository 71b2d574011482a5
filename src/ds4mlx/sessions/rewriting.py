"""Whether a client sent a tool call back as it got it: equal arguments, up to what clients do to them in passing.

Seen: keys put in the schema's order, `5000.0` -> `5000`, defaults added, white space removed at the ends of lines, text
that is no JSON wrapped up whole. Anything else is an edit, and an edit has to reach the model.
"""
import json
from collections.abc import Mapping
from decimal import Decimal
from itertools import zip_longest

Json = None | bool | int | Decimal | str | list["Json"] | dict[str, "Json"]
Schemas = Mapping[str, Mapping[str, object]]  # tool name -> the JSON schema of its arguments

UNPARSED = "__unparsedToolInput"  # how Claude Code sends input back that it could not read


def same_arguments(sampled: str, returned: str, schema: Mapping[str, object] | None = None) -> bool:
    """Whether `returned` is `sampled` but for the rewriting of clients. Both are usually the JSON text of an object;
    `schema` describes it, for its defaults."""
    if sampled == returned:
        return True
    try:
        theirs = _parse(returned)
        if isinstance(theirs, dict) and len(theirs) == 1 and isinstance(unread := theirs.get(UNPARSED), dict):
            return unread.get("raw") == sampled
        return _same(_parse(sampled), theirs, schema)
    except (ValueError, RecursionError):  # no JSON, or nested too deep to be compared
        return False


def _parse(text: str) -> Json:
    """JSON with exact numbers: as floats, long integers that differ would be equal."""
    value: Json = json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    return value


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is not JSON")


def _same(ours: Json, theirs: Json, schema: object) -> bool:
    match ours, theirs:
        case dict(), dict():
            return ours.keys() <= theirs.keys() and all(
                _same(ours[key], value, _property(schema, key)) if key in ours
                else _is_default(value, _property(schema, key)) for key, value in theirs.items())
        case list(), list():
            items = schema.get("items") if isinstance(schema, Mapping) else None
            return len(ours) == len(theirs) and all(_same(a, b, items) for a, b in zip(ours, theirs))
        case str(), str():
            return _same_lines(ours, theirs)
        case (bool() | None, _) | (_, bool() | None):  # before numbers: True == 1
            return ours is theirs
        case int() | Decimal(), int() | Decimal():
            return ours == theirs
    return False


def _is_default(added: Json, schema: object) -> bool:
    if added is None or added is False:
        return True
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    default = _parse(json.dumps(schema["default"]))  # in the types of what was parsed here
    return _same(default, added, None) and _same(added, default, None)


def _property(schema: object, key: str) -> object:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _same_lines(ours: str, theirs: str) -> bool:
    return ours == theirs or all(a is not None and b is not None and a.rstrip() == b.rstrip()
                                 for a, b in zip_longest(ours.split("\n"), theirs.split("\n")))
