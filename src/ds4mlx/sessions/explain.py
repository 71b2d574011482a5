"""Why a prompt was not taken further from what was there: in numbers, with the client's block where the texts part.

Nothing here holds a client's text, so all of it may be logged and sent in headers.
"""
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ds4mlx.sessions.lookup import MIN_REWIND, Decision, Live, Source, Verdict, Wanted, common_bytes

MemoryMiss = Literal["no-live-checkpoint", "token-mismatch", "incoming-prompt-shorter-than-live-checkpoint",
                     "live-prefix-match"]
AFTER_ALL = "answer"  # the block that opens the answer: no client wrote it


@dataclass(frozen=True, slots=True)
class Origin:
    """A block of the request, as "system" or "messages[3]", by where it ends in the prompt's key, in bytes."""
    label: str
    end: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt's text parts from a text that was known: `byte` of a block as it was rendered.

    beside: the text that went along furthest: "live", the kind of a visible key, or the name of a saved state.
    """
    block: str
    byte: int
    beside: str


@dataclass(frozen=True, slots=True)
class Row:
    """One position of two token histories."""
    position: int
    live: int | None
    prompt: int | None

    @property
    def same(self) -> bool:
        return self.live == self.prompt


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of one request's lookup. Lengths in tokens."""
    source: Source
    reused: int
    common: int   # that prompt and live state begin with
    prompt: int
    live: int
    reason: MemoryMiss
    place: Place | None
    alike: int    # bytes of the prompt's key that the known text of `place` begins with
    because: str  # in words, where less was reused than there was; else ""
    verdicts: tuple[Verdict, ...]
    beside: int | None = None   # the other slot whose state the prompt was compared with, None for the slot's own
    branched: bool = False      # what was reused is shared with that slot

    @property
    def lost(self) -> int:
        """Common tokens that are computed again."""
        return max(0, self.common - self.reused)

    @property
    def disk_miss(self) -> str:
        """Why no saved state was gone on from; "" where one was, or where what is in memory was enough."""
        found = next((v.outcome for v in self.verdicts if v.source == "disk-text"), "")
        return "" if found == "taken" else found

    def header(self) -> str:
        """On one line, for `x-ds4mlx-cache`."""
        differs = f"; differs={self.place.block}+{self.place.byte}" if self.place else ""
        beside = "" if self.beside is None else f"; {'from' if self.branched else 'beside'}-slot={self.beside}"
        return (f"{self.source}; reused={self.reused}; prompt={self.prompt}; common={self.common}; live={self.live}; "
                f"reason={self.reason}{differs}{beside}")


def explain(decision: Decision, wanted: Wanted, live: Live, origins: Sequence[Origin] = (),
            saved_keys: Mapping[str, bytes] | None = None) -> Explanation:
    """A decision in numbers. live: the slot's own state; origins: the request's blocks in order; saved_keys: of saved
    states to compare with."""
    best, beside = decision.best, decision.beside
    live = beside.live if beside else live
    reused = best.tokens if best else 0
    alike, place = _parting(wanted, live, origins, saved_keys or {})
    return Explanation(best.source if best else "none", reused, decision.common_tokens, len(wanted.ids),
                       len(live.tokens), _reason(decision, wanted, live), place, alike,
                       _because(decision, live, reused, place), decision.verdicts, beside.slot if beside else None,
                       best is not None and best.donor is not None)


def first_mismatch(live: Sequence[int], prompt: Sequence[int], common: int, around: int = 8) -> tuple[Row, ...]:
    """The tokens around the first position, `common`, where two histories differ."""
    start = max(0, common - around)
    end = common + 1 + around
    pairs = zip_longest(live[start:end], prompt[start:end])
    return tuple(Row(position, a, b) for position, (a, b) in enumerate(pairs, start))


def _reason(decision: Decision, wanted: Wanted, live: Live) -> MemoryMiss:
    if not live.tokens:
        return "no-live-checkpoint"
    if decision.common_tokens == len(live.tokens):
        return "live-prefix-match"
    if decision.common_tokens == len(wanted.ids):
        return "incoming-prompt-shorter-than-live-checkpoint"
    return "token-mismatch"


def _parting(wanted: Wanted, live: Live, origins: Sequence[Origin],
             saved_keys: Mapping[str, bytes]) -> tuple[int, Place | None]:
    """Where the prompt leaves the known text that it follows furthest, as byte and place; 0 where it leaves none."""
    known = {"live": live.key} | {key.kind: key.key for key in live.visible if key.frontier == len(live.tokens)}
    known |= saved_keys
    beside, byte = max(((name, common_bytes(key, wanted.key)) for name, key in known.items()), key=lambda pair: pair[1])
    if byte in (len(known[beside]), len(wanted.key)):
        return 0, None
    ends = [origin.end for origin in origins]
    at = bisect_right(ends, byte)
    start = ends[at - 1] if at else 0
    return byte, Place(origins[at].label if at < len(ends) else AFTER_ALL, byte - start, beside)


def _because(decision: Decision, live: Live, reused: int, place: Place | None) -> str:
    best, common = decision.best, decision.common_tokens
    if best is None:
        return "the request holds results of tool calls without the calls, and the state they belong to is gone"
    if best.whole or best.donor is None and reused == common == len(live.tokens) > 0:
        return ""
    said = [_where(decision, live, place)]
    if best.source == "disk-text":
        said.append(f"a saved state of {reused} tokens goes further than what is live")
    elif best.donor is not None:
        said.append(f"its first {reused} tokens are shared with that slot")
    elif best.source == "memory-rewind" and reused < common:
        said.append(f"{reused} is the longest length to go back to")
    elif best.source == "none" and any(verdict.outcome == "unreachable" for verdict in decision.verdicts):
        said.append("what is live serves only with more than the context holds")
    elif best.source == "none" and live.tokens:
        said.append(f"fewer than {MIN_REWIND} tokens are worth nothing" if common < MIN_REWIND
                    else f"there is no length of {MIN_REWIND} to {common} tokens to go back to")
    if best.source == "none":
        said.append(next((_NOTHING_SAVED.get(v.outcome, "") for v in decision.verdicts if v.source == "disk-text"), ""))
    return "; ".join(filter(None, said))


_NOTHING_SAVED = {"no-candidate": "no saved state begins this prompt",
                  "inside-a-token": "saved states end inside a token of this prompt",
                  "unreadable": "what was saved could not be read"}


def _where(decision: Decision, live: Live, place: Place | None) -> str:
    common, other = decision.common_tokens, decision.beside
    if not live.tokens:
        return "no state is live" + (f", the prompt parts from the text of {place.beside} in {place.block} at byte "
                                     f"{place.byte}" if place else "")
    state = f"the state of slot {other.slot}" if other else "the live state"
    if common == len(live.tokens):
        return f"the prompt begins with {state}, {common} tokens"
    where = f"the prompt parts from {state} at token {common} of {len(live.tokens)}"
    if place is None:
        return where
    beside = "" if place.beside == "live" else f" of {place.beside}"
    return f"{where}, its text{beside} in {place.block} at byte {place.byte}"
