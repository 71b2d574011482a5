"""What is said in a chat and how the next answer is asked for. No terminal and no engine."""
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from ds4mlx.chat.messages import Json

FORMAT = "ds4mlx-chat-1"
Think = Literal["off", "on", "low", "high", "max"]
THINK: tuple[Think, ...] = get_args(Think)


@dataclass(slots=True)
class Said:
    """One contribution. `reasoning` is the model's, and empty for a user."""
    role: Literal["user", "assistant"]
    content: str
    reasoning: str = ""

    def as_json(self) -> "dict[str, Json]":
        """In OpenAI's form."""
        reasoning: dict[str, Json] = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **reasoning}


@dataclass(slots=True)
class Dialogue:
    """A system text and contributions, of which the user's and the model's alternate."""
    system: str = ""
    think: Think = "on"
    said: list[Said] = field(default_factory=list)
    asked: int = 0      # answers so far, those that were dropped too: no two are drawn with the same numbers

    def body(self, seed: int | None = None) -> "dict[str, Json]":
        """The chat request for an answer to the last message, with the `seed` of the whole chat."""
        thinking: dict[str, Json] = {"thinking": self.think != "off"}
        if self.think in ("low", "high", "max"):
            thinking["reasoning_effort"] = self.think
        if seed is not None:
            thinking["seed"] = (seed + self.asked) % (1 << 64)
        return {"messages": self.messages(), **thinking}

    def messages(self) -> "list[Json]":
        system: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(said.as_json() for said in self.said)]

    def ask(self, text: str) -> None:
        assert not self.said or self.said[-1].role == "assistant", "the last question has no answer"
        self.said.append(Said("user", text))

    def answer(self, content: str, reasoning: str) -> None:
        """What the model said; if that is nothing, the question was never asked."""
        self.asked += 1
        if content or reasoning:
            self.said.append(Said("assistant", content, reasoning))
        else:
            self.said.pop()

    def undo(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if there is none."""
        while self.said:
            last = self.said.pop()
            if last.role == "user":
                return last.content
        return None

    # ---- files

    def write(self, path: Path) -> None:
        """Whole or not at all, readable by nobody else. Raises UsageError; replaces nothing but a chat."""
        whole = {"format": FORMAT, "think": self.think, "messages": self.messages()}
        try:
            if path.exists() and not _is_chat(path):
                raise UsageError(f"{path} is there and no chat; give another name")
            descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(json.dumps(whole, ensure_ascii=False, indent=1) + "\n")
                os.replace(partial, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
        except OSError as fault:
            raise UsageError(f"{path}: {fault.strerror}; the conversation is not saved, give a path that can be "
                             "written") from fault

    @classmethod
    def read(cls, path: Path) -> "Dialogue":
        """A chat that `write` wrote, or OpenAI's messages in JSON. Raises UsageError."""
        try:
            content = json.loads(path.read_bytes())
        except OSError as fault:
            raise UsageError(f"{path}: {fault.strerror}; give the path of a saved conversation") from fault
        except (ValueError, RecursionError) as fault:
            raise UsageError(f"{path}: not JSON in UTF-8 ({fault}); give the path of a saved conversation") from fault
        messages = content.get("messages") if isinstance(content, dict) else content
        think = content.get("think", "on") if isinstance(content, dict) else "on"
        if not isinstance(messages, list) or think not in THINK:
            raise UsageError(f"{path}: no messages in it; give the path of a saved conversation")
        dialogue = cls(think=think)
        for i, message in enumerate(messages):
            dialogue._read(message, f"{path}: messages[{i}]", first=i == 0)
        if dialogue.said and dialogue.said[-1].role == "user":
            raise UsageError(f"{path}: the last message is the user's; a conversation ends with an answer")
        return dialogue

    def _read(self, message: "Json", told: str, first: bool) -> None:
        from ds4mlx.chat.canonical import clean_text
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UsageError(f"{told}: need a role and a content that is text")
        role, content, reasoning = message.get("role"), clean_text(message["content"]), message.get("reasoning_content")
        if role == "system" and first:
            self.system = content
            return
        due = "assistant" if self.said and self.said[-1].role == "user" else "user"
        if role != due:
            raise UsageError(f"{told}: the role is {role!r}, need {due!r}: messages of user and assistant alternate")
        self.said.append(Said(due, content, clean_text(reasoning) if isinstance(reasoning, str) else ""))


def _is_chat(path: Path) -> bool:
    """Whether the file may be replaced by a chat: it is one, or empty."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return False
    return not start.strip() or f'"format": "{FORMAT}"'.encode() in start
