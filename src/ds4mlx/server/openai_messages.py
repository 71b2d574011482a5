"""Messages and tools of OpenAI's chat format -> a Conversation's parts."""
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Message, Part, Reasoning, Role, TextPart, Tool, ToolCall, ToolResult
from ds4mlx.errors import BadRequest
from ds4mlx.server.fields import Fields, unsupported

ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                          "tool": "tool", "function": "tool", "latest_reminder": "latest_reminder"}
TEXT_MEMBER = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(body: Fields) -> tuple[Message, ...]:
    """`messages`. Raises BadRequest for none, unknown roles, and content other than text."""
    if not body.array("messages"):
        raise body.error("messages", "at least one message")
    return tuple(_read_message(message) for message in body.objects("messages"))


def _read_message(message: Fields) -> Message:
    role = message.choice("role", tuple(ROLES))
    if role is None:
        raise message.error("role", f"one of {', '.join(ROLES)}")
    if ROLES[role] == "tool":
        return Message("tool", (ToolResult(message.string("tool_call_id") or "", _read_result(message)),))
    text = read_content(message)
    parts: list[Part] = [TextPart(text)] if text else []
    if role == "assistant":
        spoken = (message.string(member) or "" for member in ("reasoning_content", "reasoning"))
        reasoning = next((text for text in spoken if text.strip()), "")  # some clients pad with a space
        parts = [*([Reasoning(reasoning)] if reasoning else []), *parts, *_read_calls(message)]
    return Message(ROLES[role], tuple(parts))


def read_content(message: Fields, member: str = "content") -> str:
    """A message's text: a string, or text parts joined; absent is empty."""
    if not isinstance(message.get(member), list):
        if isinstance(message.get(member), str | None):
            return message.string(member) or ""
        raise message.error(member, "a string or an array of parts")
    return "".join(map(_read_part, message.objects(member)))


def _read_result(message: Fields) -> str | tuple[str, ...]:
    """A tool's result: as the text of any message, or where there is more than text, blocks that name what it is."""
    parts = list(message.objects("content")) if isinstance(message.get("content"), list) else []
    kinds = [part.required_string("type") for part in parts]
    if all(kind in TEXT_MEMBER for kind in kinds):
        return read_content(message)
    return tuple(_read_part(part) if kind in TEXT_MEMBER else unsupported(kind) for part, kind in zip(parts, kinds))


def _read_part(part: Fields) -> str:
    kind = part.required_string("type")
    if kind not in TEXT_MEMBER:
        raise part.unreadable(kind, "text")
    text = part.string(TEXT_MEMBER[kind])
    if text is None:
        raise part.error(TEXT_MEMBER[kind], "a string")
    return text


def _read_calls(message: Fields) -> Iterator[ToolCall]:
    for call in message.objects("tool_calls"):
        function = call.object("function")
        if function is None:
            raise call.error("function", "an object with name and arguments")
        yield ToolCall(call.string("id") or "", function.required_string("name"), _read_arguments(function))
    if (legacy := message.object("function_call")) is not None:
        yield ToolCall("", legacy.required_string("name"), _read_arguments(legacy))


def _read_arguments(function: Fields) -> str:
    """JSON text as sent. Some clients send the object itself."""
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return clean_text(spell(arguments))
    return function.string("arguments") or "{}"


def read_tools(body: Fields) -> tuple[Tool, ...]:
    """`tools`, or `functions` of old clients, in the order received. Hosted tools, which have no function, are skipped.

    Raises BadRequest for nameless functions and for two of one name.
    """
    tools = [_read_function(function) for function in _functions(body)]
    name, times = next(iter(Counter(tool.name for tool in tools).most_common(1)), ("", 0))
    if times > 1:
        raise BadRequest(f"tools has {name!r} {times} times; names must differ", param="tools")
    return tuple(tools)


def _functions(body: Fields) -> Iterator[Fields]:
    for tool in body.objects("tools"):
        function = tool.object("function")
        if function is not None:
            yield function
        elif tool.string("type") in (None, "function"):
            raise tool.error("function", "an object with a name")
    yield from body.objects("functions")


def _read_function(function: Fields) -> Tool:
    name = function.required_string("name")
    function.string("description")
    function.object("parameters")
    return Tool(name, {key: value for key, value in function.members.items() if key != "strict"},
                strict=function.boolean("strict") or False)


def read_tool_choice(body: Fields, tools: tuple[Tool, ...]) -> bool:
    """Whether calls are forbidden ("none")."""
    return _read_choice(body, tools) == "none"


def read_must_call(body: Fields, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """The tools of which one must be called; () where that is for the model to decide."""
    choice = _read_choice(body, tools)
    return () if isinstance(choice, str) else choice


def _read_choice(body: Fields, tools: tuple[Tool, ...]) -> Literal["auto", "none"] | tuple[str, ...]:
    """`tool_choice`, or `function_call` of old clients. Raises BadRequest for a tool that is not declared."""
    member = "tool_choice" if body.get("tool_choice") is not None else "function_call"
    choice, declared = body.get(member), tuple(tool.name for tool in tools)
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return _read_allowed(Fields(choice, member), declared)
        function = Fields(choice, member).object("function") or Fields(choice, member)
        name = function.required_string("name")
        if name not in declared:
            raise BadRequest(f"{member} names {name!r}, which is not among the tools", param=member)
        return (name,)
    if choice in ("required", "any"):
        return _some(declared, member)
    if choice not in (None, "auto", "none"):
        raise body.error(member, "none, auto, required or a function")
    return "none" if choice == "none" else "auto"


def _read_allowed(choice: Fields, declared: tuple[str, ...]) -> Literal["auto"] | tuple[str, ...]:
    allowed = choice.object("allowed_tools") or choice
    names = [(tool.object("function") or tool).required_string("name") for tool in allowed.objects("tools")]
    for i, name in enumerate(names):
        if name not in declared:
            raise BadRequest(f"{allowed.name('tools')}[{i}] names {name!r}, which is not among the tools",
                             param="tool_choice")
    required = allowed.choice("mode", ("auto", "required")) == "required"
    return _some(tuple(names) or declared, choice.path) if required else "auto"


def _some(names: tuple[str, ...], member: str) -> tuple[str, ...]:
    if not names:
        raise BadRequest(f"{member} asks for a call, and there are no tools; declare one", param=member)
    return names
