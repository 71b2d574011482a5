"""Input items of the Responses API -> messages. Items of one assistant turn, which the API keeps apart, are joined."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import (
    Json, Message, Part, Reasoning, Role, TextPart, ToolCall, ToolReference, ToolResult)
from ds4mlx.errors import BadRequest
from ds4mlx.server.fields import Fields, unsupported
from ds4mlx.server.responses_tools import CUSTOM_PARAMETER, WireTools, read_wire_tools
from ds4mlx.server.sealed import unseal

ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
HOSTED_CALLS = ("local_shell_call", "web_search_call", "tool_search_call", "image_generation_call", "apply_patch_call",
                "shell_call", "mcp_call")
SKIPPED = ("compaction", "context_compaction")  # a client's notes about what it left out
HOSTED_ARGUMENTS = ("action", "arguments", "operation")

FindItem = Callable[[str], dict[str, Json] | None]  # a stored item by its id


@dataclass(frozen=True, slots=True)
class Input:
    """What the items say, and the tools that results among them brought along."""
    messages: tuple[Message, ...]
    tools: WireTools


def input_items(body: Fields) -> list[Json]:
    """`input` as items; a string is one user message."""
    value = body.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": clean_text(value)}]
    if not isinstance(value, list):
        raise body.error("input", "a string or an array of items")
    return value


def resolved(items: Sequence[Json], find_item: FindItem) -> list[Json]:
    """The items, with stored ones in the places of references to them. Raises BadRequest for those that are not."""
    return [_referred(Fields(item, f"input[{i}]"), find_item)
            if isinstance(item, dict) and item.get("type") == "item_reference" else item
            for i, item in enumerate(items)]


def read_input(items: Sequence[Json], tools: WireTools) -> Input:
    """Items -> messages. Raises BadRequest for unknown types, and for results whose call is nowhere before them.

    Only input that is nothing but results may leave the calls out: a state that waits for them may be there.
    """
    turns = _Turns(tools)
    for i, value in enumerate(items):
        _read_item(Fields.of(value, f"input[{i}]"), turns)
    turns.close_reasoning()
    _check_results(turns.messages)
    return Input(tuple(turns.messages), turns.tools)


@dataclass(slots=True)
class _Turns:
    """Messages as they come about: assistant items wait until it is known what belongs together."""
    tools: WireTools
    messages: list[Message] = field(default_factory=list)
    reasoning: list[Part] = field(default_factory=list)  # of the next assistant item

    def add(self, message: Message) -> None:
        self.close_reasoning()
        self.messages.append(message)

    def say(self, text: str) -> None:
        """An assistant's message begins a turn."""
        self.messages.append(Message("assistant", (*self.reasoning, *([TextPart(text)] if text else []))))
        self.reasoning = []

    def call(self, call: ToolCall) -> None:
        """A call belongs to the turn before it, if the assistant has said or called something just now."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "assistant" and not self.reasoning:
            self.messages[-1] = Message("assistant", (*last.parts, call))
        else:
            self.messages.append(Message("assistant", (*self.reasoning, call)))
        self.reasoning = []

    def close_reasoning(self) -> None:
        """Thoughts that nothing came of are a turn of their own."""
        if self.reasoning:
            self.messages.append(Message("assistant", tuple(self.reasoning)))
        self.reasoning = []


def _read_item(item: Fields, turns: _Turns) -> None:
    kind = item.string("type") or "message"
    _check_status(item, kind)
    if kind == "message":
        _read_message(item, turns)
    elif kind == "reasoning":
        text = _reasoning(item)
        turns.reasoning += [Reasoning(text)] if text.strip() else []
    elif kind == "function_call":
        name = turns.tools.shown(item.required_string("name"), item.string("namespace"))
        turns.call(ToolCall(_call_id(item), name, _arguments(item)))
    elif kind == "custom_tool_call":
        name = turns.tools.shown(item.required_string("name"), item.string("namespace"))
        turns.call(ToolCall(_call_id(item), name, spell({CUSTOM_PARAMETER: item.string("input") or ""})))
    elif kind in HOSTED_CALLS:
        turns.call(_hosted_call(item, kind))
    elif kind.endswith("_output"):
        turns.add(Message("tool", (_result(item, turns),)))
    elif kind not in SKIPPED:
        raise BadRequest(f"{item.path} is of type {kind[:80]!r}, which is not known here; leave it out", param="input")


def _check_status(item: Fields, kind: str) -> None:
    """Half a call cannot be shown to the model as if it were one; half a text can."""
    allowed = ("completed", "incomplete") if kind in ("message", "reasoning") else ("completed",)
    status = item.string("status")
    if status is not None and status not in allowed and kind not in SKIPPED:
        raise item.error("status", " or ".join(allowed))


def _read_message(item: Fields, turns: _Turns) -> None:
    role = item.choice("role", tuple(ROLES))
    if role is None:
        raise item.error("role", f"one of {', '.join(ROLES)}")
    text = _content(item, "content")
    if role == "assistant":
        turns.say(text)
    else:
        turns.add(Message(ROLES[role], (TextPart(text),) if text else ()))


def _content(item: Fields, member: str) -> str:
    """Text: a string, or text parts joined; absent is empty."""
    value = item.get(member)
    if isinstance(value, str | None):
        return item.string(member) or ""
    if not isinstance(value, list):
        raise item.error(member, "a string or an array of parts")
    return "".join(_part(part) for part in item.objects(member))


def _part(part: Fields) -> str:
    kind = part.required_string("type")
    if kind not in TEXT_PARTS:
        raise part.unreadable(kind, "text", param="input")
    return part.string("refusal" if kind == "refusal" else "text") or ""


def _reasoning(item: Fields) -> str:
    """Sealed text before a summary before plain text: the first is what the model thought, to the letter."""
    sealed = unseal(item.string("encrypted_content") or "")
    if sealed:
        return sealed
    for member in ("summary", "content"):
        texts = [text for part in item.objects(member) if (text := _part(part))]
        if texts:
            return "\n".join(texts)
    return ""


def _call_id(item: Fields) -> str:
    return item.required_string("call_id")


def _arguments(item: Fields) -> str:
    """JSON text as sent. Some clients send the object itself."""
    value = item.get("arguments")
    return clean_text(spell(value)) if isinstance(value, dict) else item.string("arguments") or "{}"


def _hosted_call(item: Fields, kind: str) -> ToolCall:
    """A call that another server, or the client, ran without a function of ours: named after its tool."""
    name = (item.string("name") if kind == "mcp_call" else None) or kind.removesuffix("_call")
    value = next((item.get(member) for member in HOSTED_ARGUMENTS if item.get(member) is not None), {})
    arguments = clean_text(value if isinstance(value, str) else spell(value))
    return ToolCall(item.string("call_id") or item.string("id") or "", name, arguments)


def _result(item: Fields, turns: _Turns) -> ToolResult:
    if item.get("tools") is not None:   # of a search: definitions, shown where they stand
        loaded = read_wire_tools(item, deferred=True)
        turns.tools = turns.tools.with_loaded(loaded)
        return ToolResult(_call_id(item), tuple(ToolReference(tool.name) for tool in loaded.tools))
    value = item.get("output")
    is_parts = isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value)
    if is_parts and any(part["type"] not in TEXT_PARTS for part in value):
        return ToolResult(_call_id(item), tuple(map(_result_block, item.objects("output"))))
    if value is None or isinstance(value, str) or is_parts:
        return ToolResult(_call_id(item), _content(item, "output"))
    return ToolResult(_call_id(item), clean_text(spell(value)))


def _result_block(part: Fields) -> str:
    kind = part.required_string("type")
    return _part(part) if kind in TEXT_PARTS else unsupported(kind)


def _referred(item: Fields, find_item: FindItem) -> dict[str, Json]:
    id = item.required_string("id")
    stored = find_item(id)
    if stored is None:
        raise BadRequest(f"{item.path} refers to {id[:80]!r}, which is not stored here; send the item itself",
                         param="input")
    return stored


def _check_results(messages: Sequence[Message]) -> None:
    """Each result needs its call before it, unless there is nothing but results."""
    if only_results(messages):
        return
    called: set[str] = set()
    for part in (part for message in messages for part in message.parts):
        if isinstance(part, ToolCall):
            called.add(part.id)
        elif isinstance(part, ToolResult) and part.call_id not in called:
            raise BadRequest(f"input has a result for {part.call_id[:80]!r}, but no call of that id before it; send "
                             "the whole conversation, or nothing but results", param="input")


def only_results(messages: Sequence[Message]) -> bool:
    """Whether input is nothing but results, behind instructions at most."""
    kinds = {type(part) for message in messages if message.role != "system" for part in message.parts}
    return kinds == {ToolResult}
