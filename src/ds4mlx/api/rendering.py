"""Messages in OpenAI's form: a question into a chat request, an answer into the message that it becomes."""
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from ds4mlx.chat.messages import Effort, Json
from ds4mlx.engine.protocol import Sampling
from ds4mlx.errors import BadRequest

Messages = Sequence[dict[str, Json]]
ToolChoice = Literal["auto", "none", "required"] | dict[str, Json]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt: its text, with control tokens by their names, and its ids."""
    text: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Style:
    """What of a prompt is not in its messages. thinking, effort: None is what the settings say."""
    tools: tuple[dict[str, Json], ...] = ()
    thinking: bool | None = None
    effort: Effort | None = None

    def members(self) -> dict[str, Json]:
        """As members of a chat request."""
        return _given({"tools": list(self.tools) or None, "thinking": self.thinking, "reasoning_effort": self.effort})


def request(messages: Messages, style: Style, tool_choice: ToolChoice | None = None,
            response_format: dict[str, Json] | None = None) -> dict[str, Json]:
    """The body of a chat request. A last answer is open to be gone on with."""
    last = messages[-1].get("role") if messages else None
    return {"messages": list(messages), **style.members(), **({"continue_final_message": True} if last == "assistant"
                                                              else {}),
            **_given({"tool_choice": tool_choice, "response_format": response_format})}


def _given(members: dict[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in members.items() if value is not None}


def listed(said: str | Messages) -> list[dict[str, Json]]:
    """A question, or messages that are some already. Raises BadRequest for anything else."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    strange = ([message for message in said if not isinstance(message, dict)] if isinstance(said, list | tuple)
               else [said])
    if strange:
        raise BadRequest(f"what is said is {reprlib.repr(strange[0])}, need a text, or a list of messages such as "
                         '{"role": "user", "content": "Hi"}')
    return list(said)


def require_limits(max_tokens: int | None, sampling: Sampling | None) -> None:
    """Raises BadRequest for what is no limit, or no way to draw an answer."""
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 0):
        raise BadRequest(f"max_tokens is {max_tokens!r}, need a whole number of at least 0", param="max_tokens")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise BadRequest(f"sampling is {sampling!r}, need such as ds4mlx.Sampling(temperature=0.5)", param="sampling")


def counted(number: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Where an answer stops; one text is one string, not its letters."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def answer_message(text: str, reasoning: str, calls: Sequence[tuple[str, str]],
                   call_ids: Sequence[str]) -> dict[str, Json]:
    """An answer as a client sends it back."""
    message: dict[str, Json] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        names = [call_id or f"call_{i}" for call_id, i in zip([*call_ids, *[""] * len(calls)], count())]
        message["tool_calls"] = [{"id": name, "type": "function", "function": {"name": call[0], "arguments": call[1]}}
                                 for name, call in zip(names, calls)]
    return message
