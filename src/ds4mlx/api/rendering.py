"""Messages in OpenAI's form to the prompt that a server would make of them."""
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.dialects.prompt import Prompt
from ds4mlx.chat.messages import Conversation, Effort, Json
from ds4mlx.config import Settings
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat
from ds4mlx.service.encoding import settled
from ds4mlx.text.segments import rendered_text
from ds4mlx.text.tokenizer import Tokenizer

Messages = Sequence[dict[str, Json]]


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
        given = {"tools": list(self.tools) or None, "thinking": self.thinking, "reasoning_effort": self.effort}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Renderer:
    tokenizer: Tokenizer
    settings: Settings
    profile: EffortProfile
    context: int

    def conversation(self, messages: Messages, style: Style) -> Conversation:
        """Raises BadRequest naming the field at fault. A last answer is open to be gone on with."""
        body = Fields({"messages": list(messages), **style.members(),
                       "continue_final_message": bool(messages) and messages[-1].get("role") == "assistant"})
        return settled(read_chat(body, self.settings).turn.conversation, self.settings, self.profile, self.context)

    def prompt(self, conversation: Conversation) -> Prompt:
        return render(conversation, effort_profile=self.profile, layout=self.settings.prompt_layout)

    def render(self, messages: Messages, style: Style) -> Rendered:
        segments = self.prompt(self.conversation(messages, style)).segments
        return Rendered(rendered_text(segments), self.tokenizer.encode(segments))

    def told_by(self, text: str, messages: Messages, style: Style) -> int:
        """How many of the messages, the first ones, a session of this text holds whole."""
        for told in range(len(messages), 0, -1):
            prompt = self.prompt(self.conversation(messages[:told], style))
            if text.startswith(rendered_text(prompt.segments[:prompt.ends[-1]])):
                return told
        return 0


def listed(said: str | Messages, role: Literal["user", "system"] = "user") -> list[dict[str, Json]]:
    """A question, or messages that are some already."""
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


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
