"""Low-level messages -> segments: the rules of the encoder that DeepSeek publishes with V4.

`deepseek_v4.render` turns a conversation into low-level messages; the two are apart because these rules are the
model's and those are ours.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from ds4mlx.chat.canonical import clean_text
from ds4mlx.chat.dialects.deepseek_v4_templates import (
    EFFORT_TEXT, EffortProfile, format_block, result_block, tools_block)
from ds4mlx.chat.dialects.prompt import Prompt, Replay
from ds4mlx.chat.messages import Effort, Json, ToolCall
from ds4mlx.chat.syntax.dsml_writing import render_calls
from ds4mlx.errors import BadRequest
from ds4mlx.text.segments import (
    ASSISTANT, BOS, EOS, LATEST_REMINDER, TASKS, THINK_CLOSE, THINK_OPEN, USER, Control, Segment, Text, Tokens)

ThinkingMode = Literal["thinking", "chat"]
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


@dataclass(frozen=True, slots=True)
class LowLevelMessage:
    """One message as the published encoder takes it."""
    role: str                                       # one of ROLES
    content: str | None = None
    tools: tuple[dict[str, Json], ...] = ()         # system, developer: schemas
    response_format: dict[str, Json] | None = None  # system, developer
    reasoning: str | None = None                    # assistant
    calls: tuple[ToolCall, ...] = ()                # assistant
    call_id: str | None = None                      # tool
    task: str | None = None                         # user, assistant: a key of TASKS
    wo_eos: bool = False                            # assistant: to be continued
    replay: Replay | None = None                    # assistant: sampled block to repeat instead of `calls`


@dataclass(slots=True)
class _Block:
    """A part of a user turn; `source` is the index of the message that it came from."""
    source: int
    text: str
    is_result: bool
    call_id: str | None


@dataclass(slots=True)
class _Turn:
    source: int
    message: LowLevelMessage
    blocks: list[_Block] = field(default_factory=list)  # of a user turn


@dataclass(slots=True)
class _Writer:
    """Segments as they are written, and where each message ended."""
    ends: list[int]
    segments: list[Segment] = field(default_factory=list)

    def add(self, *pieces: str | Segment) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                piece = Text(piece)
            if not isinstance(piece, Text):
                self.segments.append(piece)
            elif piece.text:  # cleaned here because JSON inside arguments can still spell lone surrogates
                self.segments.append(Text(clean_text(piece.text)))

    def end(self, source: int) -> None:
        self.ends[source] = len(self.segments)


def render_low_level(messages: Sequence[LowLevelMessage], thinking_mode: ThinkingMode, effort: Effort | None = None,
                     effort_profile: EffortProfile = "0731", drop_thinking: bool = True, add_bos: bool = True,
                     tools_first: bool = False) -> Prompt:
    """The exact prompt of these messages; `ends` counts them. Raises BadRequest for what the encoder cannot take."""
    _check(messages)
    thinking = thinking_mode == "thinking"
    drop = thinking and drop_thinking and not any(message.tools for message in messages)
    turns = _merged(messages)
    _sort_results(turns)
    turns = _without_old_reasoning(turns) if drop else turns
    question = _last_question(turns)
    out = _Writer([0] * len(messages))
    if add_bos:
        out.add(Control(BOS))
    if thinking:
        out.add(EFFORT_TEXT[effort_profile][effort or "low"])
    for i, turn in enumerate(turns):
        follows_task = i > 0 and turns[i - 1].message.task is not None
        _write_turn(out, turn, tools_first, reasons=thinking and not follows_task and (not drop or i > question))
        if i + 1 == len(turns) or turns[i + 1].message.role in ("assistant", "latest_reminder"):
            opens_thinking = thinking and (turn.message.task is not None or not drop or i >= question)
            out.add(*_transition(turn.message, opens_thinking))
    return Prompt(tuple(out.segments), tuple(accumulate(out.ends, max)), thinking)


def _check(messages: Sequence[LowLevelMessage]) -> None:
    if not messages:
        raise BadRequest("messages is empty; send at least one user message", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            raise BadRequest(f"{where}.role is {message.role!r}, need one of {', '.join(ROLES)}", param="messages")
        if message.role == "developer" and not message.content:
            raise BadRequest(f"{where} is a developer message without content; give it some", param="messages")
        if message.task is not None and message.task not in TASKS:
            raise BadRequest(f"{where}.task is {message.task!r}, need one of {', '.join(TASKS)}", param="messages")


def _merged(messages: Sequence[LowLevelMessage]) -> list[_Turn]:
    """Turns: neighbouring user and tool messages become one user turn of blocks.

    A user turn with a task takes no more texts, but still takes tool results.
    """
    turns: list[_Turn] = []
    for source, message in enumerate(messages):
        if message.role not in ("user", "tool"):
            turns.append(_Turn(source, message))
            continue
        is_result = message.role == "tool"
        last = turns[-1].message if turns else None
        if last is None or last.role != "user" or (last.task is not None and not is_result):
            turns.append(_Turn(source, LowLevelMessage("user", task=message.task)))
        turns[-1].blocks.append(_Block(source, message.content or "", is_result, message.call_id))
    return turns


def _sort_results(turns: Sequence[_Turn]) -> None:
    """Put the results of each user turn in the order of the calls they answer; texts keep their places."""
    order: dict[str, int] = {}  # call id -> its place in the latest assistant message with calls
    for turn in turns:
        if turn.message.calls:
            order = {call.id: place for place, call in enumerate(turn.message.calls) if call.id}
        results = [block for block in turn.blocks if block.is_result]
        in_order = iter(sorted(results, key=lambda block: order.get(block.call_id or "", 0)))
        turn.blocks = [next(in_order) if block.is_result else block for block in turn.blocks]


def _last_question(turns: Sequence[_Turn]) -> int:
    """Index of the last user or developer turn, -1 without one."""
    return max((i for i, turn in enumerate(turns) if turn.message.role in ("user", "developer")), default=-1)


def _without_old_reasoning(turns: Sequence[_Turn]) -> list[_Turn]:
    """Before the last question: no reasoning, and no developer turns at all."""
    question = _last_question(turns)
    old = [_Turn(turn.source, replace(turn.message, reasoning=None), turn.blocks) for turn in turns[:max(question, 0)]
           if turn.message.role != "developer"]
    return old + list(turns[max(question, 0):])


def _write_turn(out: _Writer, turn: _Turn, tools_first: bool, reasons: bool) -> None:
    """All of one turn but the transition to the next. `reasons`: an assistant turn shows and closes its reasoning."""
    message = turn.message
    if message.role == "user":
        out.add(Control(USER))
        for i, block in enumerate(turn.blocks):
            out.add("\n\n" if i else "", *(result_block(block.text) if block.is_result else [block.text]))
            out.end(block.source)
        return
    if message.role == "assistant":
        _write_answer(out, message, reasons)
    elif message.role == "latest_reminder":
        out.add(Control(LATEST_REMINDER), message.content or "")
    else:
        out.add(*([Control(USER)] if message.role == "developer" else []))
        _write_instructions(out, message, tools_first)
    out.end(turn.source)


def _write_instructions(out: _Writer, message: LowLevelMessage, tools_first: bool) -> None:
    tools = tools_block(message.tools) if message.tools else []
    content = message.content or ""
    if tools and tools_first:
        out.add(*tools, "\n\n" if content else "", content)
    else:
        out.add(content, "\n\n" if tools else "", *tools)
    if message.response_format:
        out.add("\n\n", *format_block(message.response_format))


def _write_answer(out: _Writer, message: LowLevelMessage, reasons: bool) -> None:
    if reasons:
        out.add(message.reasoning or "", Control(THINK_CLOSE))
    out.add(message.content or "")
    if message.replay is not None:
        out.add(message.replay.lead, Tokens(message.replay.ids, message.replay.text))
    else:
        out.add(*render_calls(message.calls))
    if not message.wo_eos:
        out.add(Control(EOS))


def _transition(message: LowLevelMessage, opens_thinking: bool) -> list[Segment]:
    """What makes the model answer this message: the answer's header, or a task token."""
    header: list[Segment] = [Control(ASSISTANT), Control(THINK_OPEN if opens_thinking else THINK_CLOSE)]
    if message.task is not None:
        return [*(header if message.task == "action" else []), Control(TASKS[message.task])]
    return header if message.role in ("user", "developer") else []
