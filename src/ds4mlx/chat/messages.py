"""A conversation as every API reader produces it and every dialect renders it."""
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
Effort = Literal["low", "high", "max"]
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of any role."""
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What an assistant thought before it answered."""
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made."""
    id: str
    name: str
    arguments: str  # as received or sampled: usually the JSON text of an object


@dataclass(frozen=True, slots=True)
class ToolReference:
    """Stands for a deferred tool inside a result: the tool's schema is shown there."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call."""
    call_id: str
    content: str | tuple[str | ToolReference, ...]  # a tuple: blocks, shown with a blank line between them


Part = TextPart | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """One turn's contribution, its parts in order. Strings hold no lone surrogates (`canonical.clean_text`)."""
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `schema` is the object shown to the model, key order as received."""
    name: str
    schema: dict[str, Json]
    deferred: bool = False  # not shown until a result refers to it; may be called all the same
    strict: bool = False    # its arguments must satisfy schema["parameters"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that decides the prompt, and how its answer is read."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    effort: Effort | None = None                 # None: the server's default
    response_format: dict[str, Json] | None = None
    tools_banned: bool = False                   # tool_choice "none": schemas stay, no block may be opened
    must_call: tuple[str, ...] = ()              # the answer is a call of one of these tools; (): as the model likes
    continue_final: bool = False                 # the last assistant message is a prefix to go on from
    ids: tuple[str, ...] = field(default=(), compare=False)  # affinity hints of the client, never rendered
