"""Messages, system text and tools of Anthropic's format -> a Conversation's parts."""
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ds4mlx.chat.canonical import clean_text, drop_billing
from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Message, Part, Reasoning, TextPart, Tool, ToolCall, ToolReference, ToolResult
from ds4mlx.errors import BadRequest
from ds4mlx.server.fields import Fields, unsupported
from ds4mlx.server.sealed import unseal

log = logging.getLogger(__name__)

Reader = Callable[[Fields], Part]


def read_system(body: Fields) -> tuple[Message, ...]:
    """`system`, a string or text blocks with a blank line between them, as no message or one. Blocks that only carry
    a client's billing line are left out."""
    if isinstance(body.get("system"), list):
        texts = [_read_text(block) for block in _of_types(body, "system", ("text",))]
    else:
        texts = [body.string("system") or ""]
    text = "\n\n".join(kept for text in texts if (kept := drop_billing(text)))
    return (Message("system", (TextPart(text),)),) if text else ()


def read_messages(body: Fields) -> tuple[Message, ...]:
    """`messages`. Raises BadRequest for none, unknown roles, blocks that a role cannot hold, and results of calls that
    the messages before do not make."""
    if not body.array("messages"):
        raise body.error("messages", "at least one message")
    messages = tuple(_read_message(message) for message in body.objects("messages"))
    _check_results(messages)
    return messages


def _read_message(message: Fields) -> Message:
    role = message.choice("role", tuple(READERS))
    if role is None:
        raise message.error("role", f"one of {', '.join(READERS)}")
    readers = READERS[role]
    if not isinstance(message.get("content"), list):
        if not isinstance(message.get("content"), str):
            raise message.error("content", "a string or an array of blocks")
        text = message.string("content")
        return Message(role, (TextPart(text),) if text else ())
    parts = (readers[block.string("type")](block) for block in _of_types(message, "content", tuple(readers)))
    return Message(role, tuple(part for part in parts if part not in (TextPart(""), Reasoning(""))))


def _of_types(place: Fields, member: str, types: tuple[str, ...]) -> list[Fields]:
    """The blocks of an array. What cannot be shown to the model is refused by name, never dropped silently."""
    blocks = list(place.objects(member))
    for block in blocks:
        kind = block.required_string("type")
        if kind not in types:
            raise block.unreadable(kind, f"one of {', '.join(types)}")
    return blocks


def _read_text(block: Fields) -> str:
    text = block.string("text")
    if text is None:
        raise block.error("text", "a string")
    return text


def _read_thinking(block: Fields) -> Reasoning:
    """What this server sealed goes before the text, which clients may leave out. Foreign signatures mean nothing."""
    return Reasoning(_sealed(block, "signature") or block.string("thinking") or "")


def _read_redacted(block: Fields) -> Reasoning:
    return Reasoning(_sealed(block, "data") or "")


def _sealed(block: Fields, member: str) -> str | None:
    value = block.get(member)
    return unseal(value) if isinstance(value, str) else None


def _read_call(block: Fields) -> ToolCall:
    given = block.object("input") or Fields({})
    try:
        arguments = clean_text(spell(given.members))
    except RecursionError as fault:
        raise BadRequest(f"{block.name('input')} is nested too deep; flatten it", param=block.path) from fault
    return ToolCall(block.required_string("id"), block.required_string("name"), arguments)


def _read_result(block: Fields) -> ToolResult:
    """`is_error` adds nothing: the text says it. What is no text is named in its place: an agent that looks at an image
    by itself has nobody who could take it back."""
    call_id = block.required_string("tool_use_id")
    if not isinstance(block.get("content"), list):
        return ToolResult(call_id, block.string("content") or "")
    return ToolResult(call_id, tuple(map(_result_block, block.objects("content"))))


def _result_block(block: Fields) -> str | ToolReference:
    match block.required_string("type"):
        case "text":
            return _read_text(block)
        case "tool_reference":
            return ToolReference(block.required_string("tool_name"))
        case kind:
            return unsupported(kind)


def _text_part(block: Fields) -> TextPart:
    return TextPart(_read_text(block))


READERS: dict[str, dict[str, Reader]] = {  # role -> type of block -> its reader
    "user": {"text": _text_part, "tool_result": _read_result},
    "assistant": {"text": _text_part, "thinking": _read_thinking, "redacted_thinking": _read_redacted,
                  "tool_use": _read_call},
    "system": {"text": _text_part},
}


def _check_results(messages: tuple[Message, ...]) -> None:
    """The prompt is made of the request alone, so what a result answers must be in it."""
    made: set[str] = set()
    for i, message in enumerate(messages):
        for part in message.parts:
            if isinstance(part, ToolCall):
                made.add(part.id)
            elif isinstance(part, ToolResult) and part.call_id not in made:
                raise BadRequest(f"messages[{i}] has a result of call {part.call_id[:80]!r}, which no message before "
                                 "it makes; retry by replaying the full messages history", param=f"messages[{i}]")


def read_tools(body: Fields) -> tuple[Tool, ...]:
    """`tools` in the order received. Those that Anthropic's own servers run, known by having no schema, are skipped.

    Raises BadRequest for nameless tools and for two of one name.
    """
    tools = tuple(tool for fields in body.objects("tools") if (tool := _read_tool(fields)) is not None)
    name, times = next(iter(Counter(tool.name for tool in tools).most_common(1)), ("", 0))
    if times > 1:
        raise BadRequest(f"tools has {name!r} {times} times; names must differ", param="tools")
    return tools


def _read_tool(tool: Fields) -> Tool | None:
    """A tool as the model was trained to read it, its schema under `parameters`."""
    kind, schema = tool.string("type"), tool.object("input_schema")
    if schema is None:
        if kind in (None, "custom"):
            raise tool.error("input_schema", "an object")
        log.debug("a tool of type %s is skipped: nobody here can run it", kind)
        return None
    name, description = tool.required_string("name"), tool.string("description")
    told = {} if description is None else {"description": description}
    return Tool(name, {"name": name, **told, "parameters": schema.members},
                deferred=tool.boolean("defer_loading") or False, strict=tool.boolean("strict") or False)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether calls are forbidden; of which tools one must be called, () where none must; whether one is the most."""
    banned: bool = False
    must_call: tuple[str, ...] = ()
    one_call: bool = False


def read_tool_choice(body: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """`tool_choice`. Raises BadRequest for a tool that is not declared, and for a call where there is none."""
    choice = body.object("tool_choice")
    if choice is None:
        return ToolChoice()
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind is None:
        raise choice.error("type", "auto, any, tool or none")
    names = tuple(tool.name for tool in tools)
    if kind == "tool" and (name := choice.required_string("name")) not in names:
        raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    if kind == "any" and not names:
        raise BadRequest("tool_choice asks for a call, and there are no tools; declare one", param="tool_choice")
    must_call = (name,) if kind == "tool" else names if kind == "any" else ()
    return ToolChoice(kind == "none", must_call, choice.boolean("disable_parallel_tool_use") or False)
