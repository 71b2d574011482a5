"""One lesson as a conversation, rendered by the server's own renderer, its answers included."""
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds4mlx.chat.dialects.deepseek_v4_turns import LowLevelMessage, render_low_level
from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Effort, Json, ToolCall
from ds4mlx.text.segments import Segment


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a lesson wants it: `arguments` in the order in which they are written."""
    name: str
    arguments: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Ask:
    text: str


@dataclass(frozen=True, slots=True)
class Results:
    """What the calls before gave, in their order."""
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What is learned: reasoning (thinking mode alone), then text, calls, or both."""
    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


Turn = Ask | Results | Reply


@dataclass(slots=True)
class Episode:
    """A conversation that ends with a reply. `bare`: the schemas stand in the system text without the instructions
    around them, which is a third of the length and enough to learn from at first. `strange`: none of its answers is
    known by heart, so that the pieces of its names may be exchanged."""
    turns: list[Turn] = field(default_factory=list)
    system: str = ""
    tools: Sequence[dict[str, Json]] = ()
    thinking: bool = False
    effort: Effort = "low"
    bare: bool = False
    strange: bool = False

    def segments(self) -> tuple[Segment, ...]:
        """The prompt and all answers, as a server would have them in its history after the last one."""
        system, tools = self.system, tuple(self.tools)
        if self.bare and tools:
            schemas = "### Available Tool Schemas\n\n" + "\n".join(map(spell, tools)) + "\n"
            system, tools = f"{system}\n\n{schemas}" if system else schemas, ()
        messages = [LowLevelMessage("system", system, tools)]
        for i, turn in enumerate(self.turns):
            messages += _messages(turn, i)
        return render_low_level(messages, "thinking" if self.thinking else "chat", self.effort,
                                drop_thinking=not self.tools).segments


def _messages(turn: Turn, place: int) -> list[LowLevelMessage]:
    match turn:
        case Ask(text):
            return [LowLevelMessage("user", text)]
        case Results(texts):
            return [LowLevelMessage("tool", text, call_id=f"{place - 1}.{i}") for i, text in enumerate(texts)]
        case Reply(text, calls, reasoning):
            made = tuple(ToolCall(f"{place}.{i}", call.name, spell(call.arguments)) for i, call in enumerate(calls))
            return [LowLevelMessage("assistant", text, reasoning=reasoning, calls=made)]
