"""What an answer may be, as a grammar text for `text.grammar`: JSON of a schema, or a block of calls of given tools."""
from collections.abc import Collection, Sequence

from ds4mlx.chat.messages import Json, Tool
from ds4mlx.chat.syntax.dsml_grammar import calls
from ds4mlx.chat.syntax.schemas import json_rule

SPACED: dict[str, Json] = {"item_separator": ", ", "key_separator": ": "}
BLANKS = r"[\x20\x0A\x0D\x09]{1,64}"   # at a place where JSON has room for some: bounded, or a model may never end them


def answer_grammar(form: dict[str, Json] | None, tools: Sequence[Tool], names: Collection[str], *,
                   must_call: bool) -> str:
    """The visible part of an answer: text of a response format, or a block of calls of the tools in `names`.

    must_call: a block and no text. Without a format there is no text. Raises BadRequest as `calls` does.
    """
    allowed = [tool for tool in tools if tool.name in names]
    starts, rules = [], ""
    if form is not None and not must_call:
        starts, rules = ["text"], f"\ntext: {_text(form)}"
    if allowed:
        starts.append(r'"\n\n<" dsml block')
        rules += "\n" + calls(allowed)
    return f"start: {' | '.join(starts)}{rules}"


def block_grammar(tools: Sequence[Tool]) -> str:
    """A block of calls behind its opening `<｜DSML｜`. Raises BadRequest as `calls` does."""
    return f"start: block\n{calls(tools)}"


def arguments_grammar(tool: Tool) -> str:
    """The arguments of a tool's call as one JSON text, as `json_text.spell` writes it, in its schema's order."""
    schema = tool.schema.get("parameters")
    return f"start: {json_rule({} if schema is None else schema, {'whitespace_flexible': False, **SPACED})}"


def _text(form: dict[str, Json]) -> str:
    options: dict[str, Json] = {"whitespace_pattern": BLANKS}
    if form.get("type") == "json_object":
        return json_rule({"type": "object"}, options)
    spec = form.get("json_schema")
    spec = spec if isinstance(spec, dict) else form
    schema = spec.get("schema")
    return json_rule({} if schema is None else schema, {**options, "lenient": spec.get("strict") is not True})
