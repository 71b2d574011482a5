"""Tools of the Responses API -> a Conversation's tools, and how a call of each is named on the wire."""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ds4mlx.chat.messages import Json, Tool
from ds4mlx.errors import BadRequest
from ds4mlx.server.fields import Fields

CallKind = Literal["function", "custom", "tool_search"]
CUSTOM_PARAMETER = "input"  # of a custom tool, which takes plain text


@dataclass(frozen=True, slots=True)
class WireTool:
    """A tool as the client knows it. `tool.name`, which the model sees, differs where two namespaces share a name."""
    tool: Tool
    kind: CallKind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class WireTools:
    """The tools of one request, in the order received."""
    entries: tuple[WireTool, ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(entry.tool for entry in self.entries)

    def called(self, shown: str) -> WireTool:
        """The tool that the model means by a name. One that was not declared is a plain function."""
        return next((entry for entry in self.entries if entry.tool.name == shown),
                    WireTool(Tool(shown, {}), "function", shown))

    def shown(self, name: str, namespace: str | None) -> str:
        """The name that the model sees for what the client calls by these."""
        return next((entry.tool.name for entry in self.entries
                     if (entry.name, entry.namespace) == (name, namespace)), name)

    def with_loaded(self, loaded: "WireTools") -> "WireTools":
        """With tools that a search found. They are defined where the result stands, so that the prompt before it holds;
        one that was declared already stays as it is."""
        known = {entry.tool.name for entry in self.entries}
        more = {entry.tool.name: entry for entry in loaded.entries if entry.tool.name not in known}
        return WireTools((*self.entries, *more.values()))


def read_wire_tools(body: Fields, deferred: bool = False) -> WireTools:
    """`tools`. Hosted ones, as web_search, are skipped: there is nobody here to run them.

    deferred: show none of them before a result refers to it. Raises BadRequest for nameless functions and for two of
    one name.
    """
    entries: list[WireTool] = []
    for read in (entry for tool in body.objects("tools") for entry in _read_tool(tool, deferred)):
        taken = {entry.tool.name for entry in entries}
        if read.tool.name in taken and read.namespace:
            joined = read.namespace + read.name
            shown = replace(read.tool, name=joined, schema={**read.tool.schema, "name": joined})
            read = replace(read, tool=shown)
        if read.tool.name in taken:
            raise BadRequest(f"tools has {read.tool.name!r} twice; names must differ", param="tools")
        entries.append(read)
    return WireTools(tuple(entries))


def _read_tool(tool: Fields, deferred: bool, namespace: str | None = None) -> Iterator[WireTool]:
    kind = tool.string("type") or "function"
    deferred = deferred or tool.boolean("defer_loading") or False
    if kind == "namespace" and namespace is None:
        for inner in tool.objects("tools"):
            yield from _read_tool(inner, deferred, tool.required_string("name"))
    elif kind == "function":
        function = tool.object("function") or tool   # some clients send chat's shape
        yield _wire(_shown(function), "function", deferred, namespace, function.boolean("strict") or False)
    elif kind == "custom":
        yield _wire(_custom(tool), "custom", deferred, namespace)
    elif kind == "tool_search" and tool.string("execution") == "client":
        schema = {"name": "tool_search", **{key: value for key, value in tool.members.items()
                                            if key in ("description", "parameters")}}
        yield _wire(schema, "tool_search", False, None)


def _wire(schema: dict[str, Json], kind: CallKind, deferred: bool, namespace: str | None,
          strict: bool = False) -> WireTool:
    name = str(schema["name"])
    return WireTool(Tool(name, schema, deferred, strict), kind, name, namespace)


def _shown(function: Fields) -> dict[str, Json]:
    """What the model sees of a function: name, description and parameters, in the order received."""
    function.required_string("name")
    function.string("description")
    function.object("parameters")
    return {key: value for key, value in function.members.items() if key in ("name", "description", "parameters")}


def _custom(tool: Fields) -> dict[str, Json]:
    """A tool of free text, as a function of one string."""
    described: dict[str, Json] = {"type": "string"}
    syntax = tool.object("format")
    if syntax is not None and syntax.string("definition"):
        kind = syntax.string("syntax") or "given"
        described["description"] = f"Text that follows this {kind} grammar:\n{syntax.string('definition')}"
    schema: dict[str, Json] = {"name": tool.required_string("name")}
    if description := tool.string("description"):
        schema["description"] = description
    return schema | {"parameters": {"type": "object", "properties": {CUSTOM_PARAMETER: described},
                                    "required": [CUSTOM_PARAMETER]}}
