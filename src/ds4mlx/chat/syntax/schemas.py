"""JSON schemas as grammars see them: which values are strings, which text of a string is allowed."""
import json
from dataclasses import dataclass
from typing import TypeGuard
from urllib.parse import unquote

from ds4mlx.chat.messages import Json

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                         "$comment", "$schema", "$id", "$defs", "definitions", "contentEncoding", "contentMediaType"})
LENGTHS = ("minLength", "maxLength")
MAX_LENGTH = 10_000      # of a raw string whose length is limited; longer ones are written as JSON
MAX_REFERENCES = 32      # followed one after the other


@dataclass(frozen=True, slots=True)
class Length:
    """Characters of a string; None: without limit."""
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """What a parameter may be: strings of these lengths or these texts, and JSON of this schema (None: none)."""
    lengths: tuple[Length, ...] = ()
    texts: tuple[str, ...] = ()
    json: Json = None


def json_rule(schema: Json, options: dict[str, Json]) -> str:
    """JSON of a schema, as a part of a grammar's rule."""
    marked = {**schema, "x-guidance": options} if isinstance(schema, dict) else schema
    if isinstance(marked, bool):
        marked = {"x-guidance": options} if marked else {"not": {}}
    return "%json " + json.dumps(marked)


def read_value(schema: Json, root: Json, *, in_union: bool = False) -> Value:
    """A schema of a parameter, where `root` is the document that its references mean.

    Strings are told apart only where that is sure; all else is JSON, in which a string is a string as well.
    """
    schema = followed(schema, root)
    if not isinstance(schema, dict):
        return Value((Length(),), json=True) if schema is True else Value(json=schema)
    asserted = schema.keys() - ANNOTATIONS
    if not asserted:
        return Value((Length(),), json=True)
    if asserted == {"anyOf"} and isinstance(schema["anyOf"], list) and not in_union:
        return _union([read_value(choice, root, in_union=True) for choice in schema["anyOf"]])
    if asserted <= {"enum", "const", "type"} and asserted & {"enum", "const"}:
        return _listed(schema)
    kind = schema.get("type")
    if kind == "string":
        return _string(schema)
    if isinstance(kind, list) and "string" in kind and len(kind) > 1 and asserted <= {"type", *LENGTHS}:
        return _union([_string({**schema, "type": "string"}),
                       Value(json={**schema, "type": [name for name in kind if name != "string"]})])
    return Value(json=schema)


def _string(schema: dict[str, Json]) -> Value:
    """A schema of type string. Patterns and formats are kept to in JSON only."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    plain = schema.keys() - ANNOTATIONS <= {"type", *LENGTHS}
    if not plain or not _is_length(least) or most is not None and (not _is_length(most) or most < least):
        return Value(json=schema)
    return Value((Length(least, most),))


def _is_length(limit: Json) -> TypeGuard[int]:
    return isinstance(limit, int) and 0 <= limit <= MAX_LENGTH


def _listed(schema: dict[str, Json]) -> Value:
    """A schema that lists its values."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or "enum" in schema and "const" in schema:
        return Value(json=schema)
    kinds = schema.get("type", "string")
    strings_allowed = "string" in (kinds if isinstance(kinds, list) else [kinds])
    texts = tuple(value for value in values if isinstance(value, str)) if strings_allowed else ()
    others: list[Json] = [value for value in values if not isinstance(value, str)]
    rest: dict[str, Json] = {**{key: value for key, value in schema.items() if key == "type"}, "enum": others}
    only_strings = schema.get("type") == "string"
    return Value(texts=texts, json=rest if others and not only_strings else None)


def _union(values: list[Value]) -> Value:
    schemas: list[Json] = [value.json for value in values if value.json is not None]
    lengths = tuple(dict.fromkeys(length for value in values for length in value.lengths))
    texts = tuple(dict.fromkeys(text for value in values for text in value.texts))
    return Value(lengths, texts, schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else None)


def followed(schema: Json, root: Json) -> Json:
    """What a reference means, if it is local and stands alone; else the schema itself."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"$ref"}:
            return schema
        target = _pointed(schema["$ref"], root)
        if target is None:
            return schema
        schema = target
    return schema


def in_schema_order(value: Json, schema: Json, root: Json) -> Json:
    """A value with the members of its objects in the order that the schema declares them in, others behind them: the
    order that grammars know."""
    if isinstance(value, list):
        parts = [part.get("items") for part in _parts(schema, root)]
        return [in_schema_order(item, next(filter(None, parts), None), root) for item in value]
    if not isinstance(value, dict):
        return value
    declared: dict[str, Json] = {}
    for part in _parts(schema, root):
        if isinstance(properties := part.get("properties"), dict):
            declared |= {name: inner for name, inner in properties.items() if name not in declared}
    names = [*(name for name in declared if name in value), *(name for name in value if name not in declared)]
    return {name: in_schema_order(value[name], declared.get(name), root) for name in names}


def _parts(schema: Json, root: Json) -> list[dict[str, Json]]:
    """A schema and those that it is combined of, as far as they are objects."""
    schema = followed(schema, root)
    if not isinstance(schema, dict):
        return []
    others = [part for key in ("allOf", "anyOf", "oneOf") if isinstance(combined := schema.get(key), list)
              for part in combined]
    return [schema, *(part for other in others if isinstance(part := followed(other, root), dict))]


def _pointed(reference: Json, root: Json) -> Json:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target = root
    for step in reference.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or step not in target:
            return None
        target = target[step]
    return target


def self_contained(schema: Json, root: Json) -> Json:
    """A part of `root` as a document of its own: references into `root` keep their meaning."""
    if not isinstance(schema, dict) or not _refers(schema):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$id", "$schema")}
    return {**{key: _moved(value) for key, value in kept.items()}, "$defs": {"root": _moved(root)}}


def _refers(node: Json) -> bool:
    if isinstance(node, dict):
        return "$ref" in node or any(map(_refers, node.values()))
    return isinstance(node, list) and any(map(_refers, node))


def _moved(node: Json) -> Json:
    """A copy whose references lead to where the root is kept."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(value) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = "#/$defs/root" + reference[1:]
    return moved
