"""The tool calls that the model sampled, by their ids, to be repeated token for token in later prompts.

Clients send calls back in other words (`rewriting`), so a prompt made of what they send parts from the live state at
the first call. A call's id leads to what was sampled; what a client has edited is left to be rendered as it is.
"""
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

import numpy as np

from ds4mlx.sessions.rewriting import Schemas, same_arguments
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.segments import DSML, Control

MAX_IDS = 100_000
MAX_BYTES = 512 << 20
ASCII_SPACE = b" \t\n\r\v\f"  # what the parser hides from clients between the content and a block


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an assistant message. `arguments`: as sampled or received, usually the JSON text of an object."""
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Replays:
    """The blocks to repeat in one prompt, by the index of their message.

    Assistant messages with calls, by where they were found: mem, disk; canonical: to be rendered from what the client
    sent. `missing_ids`: ids that nobody knows.
    """
    blocks: Mapping[int, ToolBlock] = field(default_factory=dict)
    mem: int = 0
    disk: int = 0
    canonical: int = 0
    missing_ids: int = 0


@dataclass(frozen=True, slots=True)
class _Known:
    """A block with its calls as the client got them: (name, arguments) of each."""
    block: ToolBlock
    calls: tuple[tuple[str, str], ...]
    size: int  # bytes of its text, its arguments and its ids


def new_call_id(prefix: Literal["call_", "toolu_"]) -> str:
    """An id that cannot be guessed: whoever names it was sent it."""
    return prefix + secrets.token_hex(16)


def cut_block(answer: Sequence[tuple[int, bytes | Control]]) -> tuple[str, tuple[int, ...]] | None:
    """The (lead, ids) of the block that ends an answer; None when there is none.

    answer: the sampled tokens after the reasoning, each with its bytes or the control token that it is, up to the one
    that completed the block. The block begins with the first whole token after the content that clients see; what
    stands between the two is the lead. Where they part inside a token, that token's rest leads.
    """
    opening = f"<{DSML}tool_calls>".encode()
    spelled = [piece.literal.encode() if isinstance(piece, Control) else piece for _, piece in answer]
    text = b"".join(spelled)
    at = 0
    for (_, piece), spelling in zip(answer, spelled):
        if piece == Control(DSML) and at and text.startswith(opening, at - 1):  # not its quoted characters
            break
        at += len(spelling)
    else:
        return None
    content_end = len(text[:at - 1].rstrip(ASCII_SPACE))
    start = 0
    for i, spelling in enumerate(spelled):
        if start >= content_end:
            return text[content_end:start].decode("utf-8", "replace"), tuple(token for token, _ in answer[i:])
        start += len(spelling)
    raise AssertionError("the control token stands after the content")


class ToolMemory:
    """Blocks of tool calls by the ids of their calls. May be used from several threads.

    A block is kept and forgotten as a whole, the one that was used least recently first.
    """

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES, *,
                 read_calls: Callable[[ToolBlock], Sequence[tuple[str, str]]] | None = None,
                 on_disk: Callable[[str], ToolBlock | None] | None = None) -> None:
        """on_disk: the saved block that has an id; read_calls: (name, arguments) of the calls that a block's tokens
        spell, as they were sent to the client. Without both, only what was remembered is found. max_ids 0: nothing.
        """
        self.max_ids, self.max_bytes = max_ids, max_bytes
        self.ids = self.bytes = 0
        self._read_calls, self._on_disk = read_calls, on_disk
        self._of_id: dict[str, _Known] = {}
        self._by_use: OrderedDict[tuple[str, ...], _Known] = OrderedDict()  # by all ids of a block; latest last
        self._lock = Lock()

    def remember(self, block: ToolBlock, calls: Sequence[tuple[str, str]]) -> None:
        """Keep a block. `calls`: the name and arguments of each call, as the client gets them."""
        assert block.call_ids and len(block.call_ids) == len(calls), "every call of a block has its id"
        self._keep(_known(block, calls))

    def blocks_in(self, call_ids: Iterable[str], tokens: Sequence[int]) -> tuple[ToolBlock, ...]:
        """Of the blocks with these calls, those that a history holds as sampled: what to save beside its state."""
        with self._lock:
            blocks = dict.fromkeys(self._of_id[i].block for i in call_ids if i in self._of_id)
        history = np.asarray(tokens, "<u4").tobytes() if blocks else b""
        found: list[ToolBlock] = []
        end = 0  # of the last one found: ids come in the order of their calls, so the next stands behind it
        for block in blocks:
            needle = np.asarray(block.ids, "<u4").tobytes()
            at = _find(needle, history, end)
            at = _find(needle, history, 0) if at < 0 < end else at
            if at >= 0:
                found.append(block)
                end = at + len(needle)
        return tuple(found)

    def replays(self, turns: Mapping[int, Sequence[Call]], schemas: Schemas | None = None) -> Replays:
        """What to repeat in a prompt. turns: the calls of each assistant message; schemas: of the tools' arguments.

        A message repeats its block if all its calls are known by their ids, are all calls of one block, in its order,
        and are the same up to the rewriting of clients.
        """
        blocks: dict[int, ToolBlock] = {}
        asked = {index: calls for index, calls in turns.items() if calls}
        mem = disk = missing = 0
        for index, calls in asked.items():
            known, loaded = zip(*(self._known_by(call.id) for call in calls))
            missing += known.count(None)
            if known[0] is not None and _same_calls(known[0], calls, schemas or {}):
                blocks[index] = known[0].block
                mem, disk = mem + (not any(loaded)), disk + any(loaded)
        return Replays(blocks, mem, disk, len(asked) - len(blocks), missing)

    def _known_by(self, call_id: str) -> tuple[_Known | None, bool]:
        """The block of an id, and whether it had to be read from disk."""
        with self._lock:
            if (known := self._of_id.get(call_id)) is not None:
                self._by_use.move_to_end(known.block.call_ids)
                return known, False
        if not call_id or self._on_disk is None or self._read_calls is None or not self.max_ids:
            return None, False
        block = self._on_disk(call_id)
        if block is None or call_id not in block.call_ids:
            return None, False
        calls = self._read_calls(block)
        if len(calls) != len(block.call_ids):  # a saved block that spells something else
            return None, False
        self._keep(known := _known(block, calls))
        return known, True

    def _keep(self, known: _Known) -> None:
        with self._lock:
            for call_id in known.block.call_ids:
                if call_id in self._of_id:
                    self._forget(self._of_id[call_id])
            if len(known.calls) > self.max_ids or known.size > self.max_bytes:
                return
            self._by_use[known.block.call_ids] = known
            self._of_id |= dict.fromkeys(known.block.call_ids, known)
            self.ids, self.bytes = self.ids + len(known.calls), self.bytes + known.size
            while self.ids > self.max_ids or self.bytes > self.max_bytes:
                self._forget(next(iter(self._by_use.values())))

    def _forget(self, known: _Known) -> None:
        del self._by_use[known.block.call_ids]
        for call_id in known.block.call_ids:
            self._of_id.pop(call_id, None)  # a saved block may name one twice
        self.ids, self.bytes = self.ids - len(known.calls), self.bytes - known.size


def _known(block: ToolBlock, calls: Sequence[tuple[str, str]]) -> _Known:
    texts = (block.lead, block.text, *(text for call in calls for text in call))
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + 4 * len(block.ids)
    return _Known(block, tuple(calls), size)


def _same_calls(known: _Known, calls: Sequence[Call], schemas: Schemas) -> bool:
    return tuple(call.id for call in calls) == known.block.call_ids and all(
        call.name == name and same_arguments(arguments, call.arguments, schemas.get(name))
        for call, (name, arguments) in zip(calls, known.calls))


def _find(ids: bytes, history: bytes, start: int) -> int:
    """Where ids stand in a history, both as 32-bit numbers; -1 for nowhere."""
    at = history.find(ids, start)
    while at > 0 and at % 4:  # bytes of two neighbours may look like an id
        at = history.find(ids, at + 1)
    return at
