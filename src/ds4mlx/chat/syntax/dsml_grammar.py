"""A DSML block as a grammar: calls of given tools, their arguments held to the schema where the tool is strict.

A strict tool's parameters come in the order of its schema, those that it allows without declaring them at the end. A
string is written raw, as the model was trained to, where its schema limits nothing but its length or lists it; every
other value is JSON. A tool that is not strict takes any parameters.
"""
import json
from collections.abc import Iterator, Sequence

from ds4mlx.chat.messages import Json, Tool
from ds4mlx.chat.syntax.dsml_writing import attribute
from ds4mlx.chat.syntax.schemas import ANNOTATIONS, Length, Value, followed, json_rule, read_value, self_contained
from ds4mlx.errors import BadRequest

MAX_SCHEMA_DEPTH = 64   # JSON deeper than 128 is no JSON to the reader of blocks
MAX_NAME = 1000         # characters of a tool's or parameter's name
MAX_SIZE = 256 << 10    # characters of all tools' rules
OPTIONS: dict[str, Json] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
PLAIN = {"type", "properties", "required", "additionalProperties"}  # all that limits the arguments of a strict tool

# A raw value reads up to the "</" of its closing tag, whose mark no text can be. Entities would be decoded: where
# characters count, there are none.
_ENTITY = "/(?s:.*)&(amp|lt|gt|quot|apos);(?s:.*)/"
_NAME = r'/[^"<>&\x00-\x1f]{1,200}/'   # of a parameter that no schema declares
_COMMON = rf'''
block: "tool_calls>\n<" dsml call ("\n<" dsml call)* "\n</" dsml "tool_calls>"
any: "<" dsml "parameter name=\"" NAME "\" string=\"" (any_raw | any_json) dsml "parameter>\n"
any_raw: "true\">" RAW
any_json: "false\">" {json_rule({}, OPTIONS)} "</"
NAME: {_NAME}
RAW: /(?s:.*)<\//
'''.strip()


def calls(tools: Sequence[Tool]) -> str:
    """Rules, of which `block` is a block of calls of these tools, from behind its opening `<｜DSML｜`.

    Raises BadRequest for a strict tool whose arguments cannot be limited parameter by parameter.
    """
    heads = " | ".join(f"c{number}" for number in range(len(tools)))
    rules, size = [_COMMON, f"call: {heads}"], 0
    for number, tool in enumerate(tools):
        for rule in _call(f"c{number}", tool):
            rules.append(rule)
            size += len(rule)
            if size > MAX_SIZE:  # every parameter with references holds a copy of what they mean
                raise _refusal(tool, f"the grammar of the tools exceeds {MAX_SIZE} characters")
    return "\n".join(rules)


def _call(rule: str, tool: Tool) -> Iterator[str]:
    """The rules of one tool's calls."""
    if len(tool.name) > MAX_NAME:
        raise _refusal(tool, f"its name has {len(tool.name)} characters, {MAX_NAME} are allowed")
    head, tail = _literal(f'invoke name="{attribute(tool.name)}">\n'), r'"</" dsml "invoke>"'
    if not tool.strict:
        yield f'{rule}: {head} ("\\n" | any+) {tail}'
        return
    declared, required, more = _parameters(tool)
    some = [f"{rule}_n0"] if declared or more is not None else []
    none = [] if required else [r'"\n"']
    yield f"{rule}: {head} ({' | '.join(some + none)}) {tail}"
    yield from _order(rule, [name in required for name in declared], more is not None)
    for number, (name, schema) in enumerate(declared.items()):
        yield from _parameter(f"{rule}_p{number}", tool, _literal(attribute(name)), schema)
    if more is not None:
        taken = " | ".join(_literal(attribute(name)) for name in declared)
        name = f"{rule.upper()}_NAME"
        yield f"{name}: {_NAME}" + (f" & ~({taken})" if taken else "")
        yield from _parameter(f"{rule}_x", tool, name, more)


def _order(rule: str, required: list[bool], more: bool) -> Iterator[str]:
    """Rules `n0`: one parameter at least, `n1`: one at least of those from the second on, and `r1`: any of those."""
    last = len(required)
    for number, needed in enumerate(required):
        rest = f" {rule}_r{number + 1}" if number + 1 < last or more else ""
        later = f" | {rule}_n{number + 1}" if not needed and (number + 1 < last or more) else ""
        yield f"{rule}_n{number}: {rule}_p{number}{rest}{later}"
        yield f"{rule}_r{number}: {rule}_p{number}{'' if needed else '?'}{rest}"
    if more:
        yield f"{rule}_n{last}: {rule}_x+"
        yield f"{rule}_r{last}: {rule}_x*"


def _parameters(tool: Tool) -> tuple[dict[str, Json], set[str], Json]:
    """A strict tool's parameters, the required ones among them, and what others may be: None for no others."""
    root = tool.schema.get("parameters")
    _check_depth(tool, root)
    schema = followed({} if root is None else root, root)
    if not isinstance(schema, dict):
        raise _refusal(tool, "its parameters are no object")
    if foreign := schema.keys() - PLAIN - ANNOTATIONS:
        raise _refusal(tool, f"{min(foreign)[:80]} stands beside its properties")
    declared, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(declared, dict) or not isinstance(required, list) or schema.get("type", "object") != "object":
        raise _refusal(tool, "its parameters are not those of an object")
    if missing := [name for name in required if not isinstance(name, str) or name not in declared]:
        raise _refusal(tool, f"{str(missing[0])[:80]!r} is required but not among its properties")
    for name in declared:
        if not 0 < len(name) <= MAX_NAME:
            raise _refusal(tool, f"a parameter's name has {len(name)} characters, 1 to {MAX_NAME} are allowed")
    more = schema.get("additionalProperties", True)
    return declared, {str(name) for name in required}, None if more is False else more


def _parameter(rule: str, tool: Tool, name: str, schema: Json) -> Iterator[str]:
    """The rules of one parameter, a line of its block. Either form ends with the "</" of the closing tag.

    name: the literal or the terminal of what stands between the quotes.
    """
    root = tool.schema.get("parameters")
    value = read_value(schema, root)
    raw = [*_raw(rule.upper(), value)]
    forms = [f'"true\\">" ({" | ".join(form for form, _ in raw)})'] if raw else []
    if value.json is not None:
        forms.append(f'"false\\">" {json_rule(self_contained(value.json, root), OPTIONS)} "</"')
    if not forms:
        raise _refusal(tool, f"no value is allowed for {name[:80]}")
    yield (f'{rule}: "<" dsml "parameter name=\\"" {name} "\\" string=\\"" ({" | ".join(forms)}) '
           'dsml "parameter>\\n"')
    yield from (definition for _, definition in raw if definition)


def _raw(name: str, value: Value) -> Iterator[tuple[str, str]]:
    """(a terminal for raw text up to its closing tag, its definition) of each kind of string that is allowed."""
    for number, length in enumerate(value.lengths):
        if length == Length():
            yield "RAW", ""
        else:
            most = "" if length.most is None else length.most
            yield (f"{name}_L{number}",
                   f'{name}_L{number}: {name}_S{number} "</"\n'
                   f"{name}_S{number}: /(?s:.{{{length.least},{most}}})/ & ~{_ENTITY}")
    if value.texts:
        yield f"{name}_T", f'{name}_T: ({" | ".join(_literal(_unentitied(text)) for text in value.texts)}) "</"'


def _unentitied(text: str) -> str:
    """A text that decodes to itself: the ampersand of what looks like an entity is one."""
    for entity in ("amp", "lt", "gt", "quot", "apos"):
        text = text.replace(f"&{entity};", f"&amp;{entity};")
    return text


def _literal(text: str) -> str:
    return json.dumps(text)


def _check_depth(tool: Tool, schema: Json) -> None:
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for node in level if isinstance(node, list | dict)
                 for child in (node.values() if isinstance(node, dict) else node)]
    if level:
        raise _refusal(tool, f"its schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def _refusal(tool: Tool, reason: str) -> BadRequest:
    return BadRequest(f"tools: {tool.name[:80]!r} is strict, but {reason}; simplify its schema, or leave strict out",
                      param="tools", code="invalid_schema")
