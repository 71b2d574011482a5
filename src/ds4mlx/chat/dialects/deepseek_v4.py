"""Conversation -> the exact prompt of DeepSeek V4.

What the encoder published with the model leaves open is decided here, so that a conversation's later requests begin
with the bytes of its earlier ones: late system messages stay in place, reasoning stays when tools are in play.
"""
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, takewhile
from typing import Literal

from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.dialects.deepseek_v4_turns import LowLevelMessage, render_low_level
from ds4mlx.chat.dialects.prompt import Prompt, Replay
from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import (
    Conversation, Effort, Json, Message, Reasoning, TextPart, ToolCall, ToolReference, ToolResult)
from ds4mlx.errors import BadRequest
from ds4mlx.text.segments import THINK_CLOSE, THINK_OPEN

Layout = Literal["official", "tools-first"]
DEFAULT_EFFORT: dict[EffortProfile, Effort] = {"0731": "low", "preview": "high"}  # neither adds text
THINK_MAX_CONTEXT: dict[EffortProfile, int] = {"0731": 0, "preview": 393216}      # tokens; 0: no limit
ASCII_SPACE = " \t\n\r\v\f"
PARTS_OF_ROLE: dict[str, tuple[type, ...]] = {
    "system": (TextPart,), "latest_reminder": (TextPart,), "assistant": (TextPart, Reasoning, ToolCall),
    "user": (TextPart, ToolResult), "tool": (TextPart, ToolResult)}


def render(conversation: Conversation, *, effort_profile: EffortProfile, default_effort: Effort | None = None,
           layout: Layout = "official", replay: Mapping[int, Replay] | None = None) -> Prompt:
    """The prompt whose continuation is the answer; `ends` counts the conversation's messages.

    `replay` maps the index of an assistant message to the sampled block that takes the place of its calls.
    Raises BadRequest when there is nothing to answer or a message holds what its role cannot.
    """
    messages = conversation.messages
    _check_parts(messages)
    _check_answerable(conversation)
    prefill = conversation.continue_final and messages[-1].role == "assistant"
    thinking = conversation.thinking and not prefill  # a begun answer is past its reasoning
    try:
        sources, low_level = zip(*_low_level(conversation, replay or {}))
        prompt = render_low_level(
            low_level, "thinking" if thinking else "chat",
            conversation.effort or default_effort or DEFAULT_EFFORT[effort_profile], effort_profile,
            drop_thinking=not _uses_tools(conversation), tools_first=layout == "tools-first")
    except RecursionError as fault:
        raise BadRequest("a tool schema is nested too deep; flatten it", param="tools") from fault
    ends = [0] * len(messages)
    for source, end in zip(sources, prompt.ends):
        ends[source] = max(ends[source], end)
    return Prompt(prompt.segments, tuple(accumulate(ends, max)), thinking)


def parse_effort(value: str | int | float | None, profile: EffortProfile,
                 default: Effort | None = None) -> Literal["off"] | Effort:
    """A request's effort field -> level, or "off" for no thinking; None gives the default of server or profile.

    Raises BadRequest for what is no level: names, or 1 to 100 as number or decimal string.
    """
    if value is None:
        return default or DEFAULT_EFFORT[profile]
    if isinstance(value, str) and value in _EFFORT_NAMES:
        return _EFFORT_NAMES[value]
    if not isinstance(value, bool):
        try:
            percent = float(value)
        except (TypeError, ValueError, OverflowError):
            percent = 0.0
        if 1 <= percent <= 100:
            return "low" if percent < 34 else "high" if percent < 90 else "max"
    raise BadRequest(f"reasoning effort is {str(value)[:40]!r}, need one of {', '.join(_EFFORT_NAMES)} or 1 to 100",
                     param="reasoning_effort")


_EFFORT_NAMES: dict[str, Literal["off"] | Effort] = {
    "none": "off", "off": "off", "minimal": "low", "low": "low", "medium": "low", "high": "high", "xhigh": "high",
    "max": "max"}


def gate_effort(effort: Effort, profile: EffortProfile, ctx: int, min_ctx: int | None = None) -> Effort:
    """The level that a context of `ctx` tokens allows: max needs `min_ctx` (None: the profile's own, 0: no limit)."""
    needed = THINK_MAX_CONTEXT[profile] if min_ctx is None else min_ctx
    return "high" if effort == "max" and ctx < needed else effort


def _check_parts(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if message.role not in PARTS_OF_ROLE:
            raise BadRequest(f"messages[{i}].role is {message.role!r}, need one of {', '.join(PARTS_OF_ROLE)}",
                             param="messages")
        for part in message.parts:
            if not isinstance(part, PARTS_OF_ROLE[message.role]):
                raise BadRequest(f"messages[{i}]: a {message.role} message cannot hold a {type(part).__name__}",
                                 param="messages")


def _check_answerable(conversation: Conversation) -> None:
    messages = conversation.messages
    if not any(message.role in ("user", "tool") for message in messages):
        raise BadRequest("there is nothing to answer; send at least one user or tool message", param="messages")
    asides = ("system", "latest_reminder")
    last = next(message for message in reversed(messages) if message.role not in asides)
    if last.role != "assistant":
        return
    if not conversation.continue_final or last is not messages[-1]:
        raise BadRequest("last message must be user or tool", param="messages")
    if any(isinstance(part, ToolCall) for part in last.parts):
        raise BadRequest("an assistant message with tool calls cannot be continued; send their results",
                         param="messages")


def _uses_tools(conversation: Conversation) -> bool:
    """Whether reasoning must stay in the prompt.

    The history counts as well as the tools list: agents send single requests without tools over the same history,
    and dropping the reasoning there would change every earlier turn.
    """
    return bool(conversation.tools) or any(isinstance(part, (ToolCall, ToolResult))
                                           for message in conversation.messages for part in message.parts)


def _low_level(conversation: Conversation, replay: Mapping[int, Replay]) -> list[tuple[int, LowLevelMessage]]:
    """Low-level messages, each with the index of the message it came from. The first is the system region."""
    messages = conversation.messages
    region = len(list(takewhile(lambda message: message.role == "system", messages)))
    texts = [text for message in messages[:region] if (text := _text(message))]
    shown = tuple(tool.schema for tool in conversation.tools if not tool.deferred)
    result = [(max(region - 1, 0), LowLevelMessage("system", "\n\n".join(texts), shown, conversation.response_format))]
    deferred = {tool.name: tool.schema for tool in conversation.tools}
    for i, message in enumerate(messages[region:], region):
        if message.role == "assistant":
            result.append((i, _assistant(message, replay.get(i), unfinished=i + 1 == len(messages))))
        elif message.role in ("user", "tool"):
            result += [(i, low_level) for low_level in _question(message, deferred)]
        elif message.role == "latest_reminder":
            result.append((i, LowLevelMessage("latest_reminder", _text(message))))
        elif text := _text(message):  # late: moved to the head it would change the first bytes of the prompt
            result.append((i, LowLevelMessage("user", text)))
    return result


def _question(message: Message, schemas: Mapping[str, dict[str, Json]]) -> list[LowLevelMessage]:
    """A user or tool message: each result a message of its own, the texts between them joined."""
    result: list[LowLevelMessage] = []
    for results, parts in groupby(message.parts, lambda part: isinstance(part, ToolResult)):
        if results:
            result += [LowLevelMessage("tool", _content(part, schemas), call_id=part.call_id) for part in parts
                       if isinstance(part, ToolResult)]
        else:
            result.append(LowLevelMessage("user", "".join(part.text for part in parts if isinstance(part, TextPart))))
    return result or [LowLevelMessage("user", "")]


def _content(result: ToolResult, schemas: Mapping[str, dict[str, Json]]) -> str:
    """A result's text. A deferred tool is defined where it is first referred to, so that what stands before holds."""
    if isinstance(result.content, str):
        return result.content
    blocks = (_reference(block, schemas) if isinstance(block, ToolReference) else block for block in result.content)
    return "\n\n".join(blocks)


def _reference(reference: ToolReference, schemas: Mapping[str, dict[str, Json]]) -> str:
    return spell(schemas[reference.name]) if reference.name in schemas else reference.name


def _assistant(message: Message, replay: Replay | None, unfinished: bool) -> LowLevelMessage:
    content = _text(message)
    reasoning = "\n".join(part.text for part in message.parts if isinstance(part, Reasoning) and part.text.strip())
    if not reasoning and THINK_CLOSE in content:  # a client that keeps reasoning inside the content
        reasoning, content = content.split(THINK_CLOSE, 1)
        reasoning = reasoning.removeprefix(THINK_OPEN)
        reasoning = reasoning if reasoning.strip() else ""
    calls = tuple(part for part in message.parts if isinstance(part, ToolCall))
    if calls or replay is not None:  # the parser hides the white space before a block from clients
        content = content.rstrip(ASCII_SPACE)
    return LowLevelMessage("assistant", content, reasoning=reasoning, calls=calls, wo_eos=unfinished, replay=replay)


def _text(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))
