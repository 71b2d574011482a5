"""What a new prompt can go on from: the state of a slot, whole or rewound, a state on disk, or nothing.

A pure decision over lengths, ids and keys (`Tokenizer.key_bytes`). A state goes with its exact tokens; keys only select
it. In order, the first that serves:

1. responses-visible      the prompt begins with what a client of the Responses API may send back of the state
2. *-tool-output          results of exactly the calls that the state ends with
3. memory-token           the prompt begins with the state's tokens
4. thinking-visible       as 1, for the other APIs
5. memory-text            the prompt begins with the state's text, in other tokens
6. memory-rewind          an earlier length of the state, or a length of another slot's, serves in one of these ways
7. disk-text              a saved state serves by its key
8. none                   a cold prefill

Of 6 and 7 the longer wins, 6 when the two are close; of two states in memory, the slot's own.
"""
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds4mlx.errors import BadRequest
from ds4mlx.text.segments import CONTROL_LITERALS

Source = Literal["none", "memory-token", "memory-text", "memory-rewind", "disk-text", "thinking-visible",
                 "responses-visible", "responses-tool-output", "anthropic-tool-output", "chat-tool-output"]
Api = Literal["chat", "anthropic", "responses", "completions"]
VisibleKind = Literal["thinking-visible", "responses-visible"]
Outcome = Literal["taken", "no-live-state", "no-key", "stale-key", "not-a-prefix", "nothing-to-add", "inside-a-token",
                  "no-tool-results", "other-calls", "history-unknown", "history-edited", "prompt-shorter",
                  "ids-differ", "no-point", "too-short", "shorter-than-saved", "no-candidate", "barely-longer",
                  "unreadable", "unreachable"]

STRIDE = 4096           # tokens compared at once: slices of ints compare some 20 times faster than a Python loop
MIN_REWIND = 64         # tokens: BOS and the words that all prompts begin with are no conversation
DISK_GAIN = 256         # tokens that a saved state must have over a rewound one to be worth reading
MOST_DISK_TRIES = 3
TOOL_OUTPUT: dict[Api, Source] = {"chat": "chat-tool-output", "anthropic": "anthropic-tool-output",
                                  "responses": "responses-tool-output"}
VISIBLE: dict[Api, VisibleKind] = {"chat": "thinking-visible", "anthropic": "thinking-visible",
                                   "responses": "responses-visible", "completions": "thinking-visible"}
_LITERAL = re.compile(b"|".join(re.escape(literal.encode()) for literal in CONTROL_LITERALS))
_LONGEST = max(len(literal.encode()) for literal in CONTROL_LITERALS)


@dataclass(frozen=True, slots=True)
class TrailingResults:
    """The tool results that a request ends with.

    turn_end: bytes of the request's key up to the end of the assistant turn that made the calls, None when the request
    does not hold it: then only the live state can answer. alone: it holds no earlier messages at all.
    """
    call_ids: frozenset[str]
    turn_end: int | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request: its prompt in ids and as a key."""
    ids: Sequence[int]
    key: bytes
    api: Api = "chat"
    results: TrailingResults | None = None


@dataclass(frozen=True, slots=True)
class VisibleKey:
    """The key of what a client may send back of a state of `frontier` tokens, for one way of leaving things out."""
    key: bytes
    kind: VisibleKind
    frontier: int


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """An earlier length of a state. key_bytes: length of the key of its first `frontier` tokens."""
    frontier: int
    key_bytes: int


@dataclass(frozen=True, slots=True)
class Live:
    """The state of a slot, and what leads to it.

    key: of `tokens`. visible: for this length and for its rewind points; any other length makes a key stale. call_ids:
    of the calls that the state ended with when it had `calls_at` tokens.
    """
    tokens: Sequence[int] = ()
    key: bytes = b""
    visible: tuple[VisibleKey, ...] = ()
    points: tuple[RewindPoint, ...] = ()
    call_ids: frozenset[str] = frozenset()
    calls_at: int = 0


@dataclass(frozen=True, slots=True)
class Other:
    """The state of another slot. Its points are all lengths that a session can branch from, its whole one included
    where nothing is being added to it."""
    slot: int
    live: Live


@dataclass(frozen=True, slots=True)
class Stored:
    """A saved state whose key is a prefix of the request's, `key_bytes` long."""
    name: str
    tokens: int
    key_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to the prompt: keep `tokens` tokens of a state, then prefill

    ids: the request's ids after as many, rest: what follows the first `key_bytes` bytes of its key, encoded apart,
    results: a user turn of the tool results. A saved state whose tokens begin the request's ids takes ids, not rest.
    donor: the slot whose state is shared, None for the slot's own.
    """
    source: Source
    tokens: int
    then: Literal["ids", "rest", "results"]
    key_bytes: int = 0
    stored: Stored | None = None
    donor: int | None = None

    @property
    def replaces_live(self) -> bool:
        """The live state goes: save it, but choose and pin a saved state first."""
        return self.source in ("disk-text", "none") or self.donor is not None

    @property
    def whole(self) -> bool:
        """All of the live state is kept."""
        return self.source not in ("memory-rewind", "disk-text", "none")


COLD = Plan("none", 0, "ids")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one source."""
    source: Source
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Decision:
    """Plans to try in order: the next one when a file cannot be read or a restored state fails.

    None at all: the request needs a state that is gone, see `tool_state_gone`.
    """
    plans: tuple[Plan, ...]
    verdicts: tuple[Verdict, ...]
    common_tokens: int  # that the prompt and the live state begin with, or that of `beside`
    common_bytes: int   # that their keys begin with
    beside: Other | None = None     # a slot whose state has more in common with the prompt than the slot's own

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None


@dataclass(frozen=True, slots=True)
class _Match:
    """A request beside a state."""
    wanted: Wanted
    live: Live
    tokens: int
    bytes: int
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def frontier(self) -> int:
        return len(self.live.tokens)

    def judge(self, source: Source, found: Plan | Outcome) -> Plan | None:
        """Notes what came of a source. Returns the plan, if it is one."""
        plan = found if isinstance(found, Plan) else None
        self.verdicts.append(Verdict(source, "taken" if isinstance(found, Plan) else found))
        return plan

    def decision(self, *plans: Plan, beside: "tuple[Other, _Match] | None" = None) -> Decision:
        other, seen = beside or (None, self)
        return Decision(plans, tuple(self.verdicts), seen.tokens, seen.bytes, other)


_Attempt = tuple[Source, Callable[[_Match], Plan | Outcome]]


def decide(wanted: Wanted, live: Live, stored: Sequence[Stored] = (), others: Sequence[Other] = ()) -> Decision:
    """How to get to the prompt from this slot. stored: the saved states that match the request's key, best first."""
    match = _matched(wanted, live)
    needs_live = wanted.results is not None and wanted.results.turn_end is None
    for source, attempt in _needing_live(wanted.api) if needs_live else _whole_state(wanted.api):
        if plan := match.judge(source, attempt(match)):
            shorter = [] if needs_live else [found for found in (_rewind(match), COLD) if isinstance(found, Plan)]
            return match.decision(plan, *shorter)   # with what the client left out, the whole may be too long
    if needs_live:
        return match.decision()
    beside = [(other, _matched(wanted, other.live)) for other in others]
    rewound = _rewind(match)
    back = [rewound] if isinstance(rewound, Plan) else []
    back = [*_branches(beside, back[0].tokens if back else 0), *back]
    saved, outcome = _saved(wanted, back, stored)
    match.judge("memory-rewind", "shorter-than-saved" if back and saved else back[0] if back else rewound)
    match.judge("disk-text", saved[0] if saved else outcome)
    plans = [*saved, *back, COLD]
    if plans == [COLD]:
        match.judge("none", COLD)
    return match.decision(*plans, beside=_nearest(match, beside, next((plan.donor for plan in back), None)))


def branch(wanted: Wanted, other: Other) -> Plan | None:
    """The longest beginning of the prompt that the state of another slot has to share."""
    return next(iter(_branches([(other, _matched(wanted, other.live))], 0)), None)


def _matched(wanted: Wanted, live: Live) -> _Match:
    return _Match(wanted, live, common_prefix(live.tokens, wanted.ids), common_bytes(live.key, wanted.key))


def tool_state_gone(results: TrailingResults) -> BadRequest:
    """For a request that no slot has a plan for."""
    return BadRequest(f"the calls of these {len(results.call_ids)} tool results are not in the request, and the state "
                      "they belong to is gone; send the whole conversation", param="input",
                      code="continuation_state_unavailable", status=409)


def still_bound(visible: Sequence[VisibleKey], frontier: int) -> tuple[VisibleKey, ...]:
    """The keys that stay valid when a state goes back to `frontier` tokens, to be written on from there."""
    return tuple(key for key in visible if key.frontier <= frontier)


# ---- 1 to 5: the whole state

def _needing_live(api: Api) -> list[_Attempt]:
    """The sources for results whose calls the request does not hold."""
    return [attempt for attempt in _whole_state(api) if attempt[1] is _tool_output or attempt[0] == "responses-visible"]


def _whole_state(api: Api) -> list[_Attempt]:
    tokens: _Attempt = ("memory-token", _same_tokens)
    text: _Attempt = ("memory-text", _same_text)
    if api == "completions":
        return [tokens, text]
    if api == "responses":
        return [("responses-visible", _visible), (TOOL_OUTPUT[api], _tool_output), tokens, text]
    return [(TOOL_OUTPUT[api], _tool_output), tokens, ("thinking-visible", _visible), text]


def _visible(match: _Match) -> Plan | Outcome:
    return _visible_at(match, match.frontier)


def _visible_at(match: _Match, frontier: int) -> Plan | Outcome:
    """A visible key of the request's API, bound to a state of just this length."""
    kind = VISIBLE[match.wanted.api]
    keys = [key for key in match.live.visible if key.kind == kind]
    bound = [key.key for key in keys if key.frontier == frontier and frontier > 0]
    if not bound:
        return "stale-key" if keys else "no-key"
    wanted = match.wanted.key
    fitting = [key for key in bound if wanted.startswith(key)]
    if not fitting:
        return "not-a-prefix"
    longest = max(map(len, fitting))
    if longest == len(wanted) and frontier == match.frontier:   # an earlier length was the end of just this prompt
        return "nothing-to-add"
    if not clean_cut(wanted, longest):
        return "inside-a-token"
    return Plan(kind if frontier == match.frontier else "memory-rewind", frontier, "rest", longest)


def _tool_output(match: _Match) -> Plan | Outcome:
    """The results of the state's calls. Ids alone do not do where the request shows its history: one that a client has
    edited or compacted would be answered from text that it took away."""
    results, live = match.wanted.results, match.live
    if results is None:
        return "no-tool-results"
    if not live.tokens:
        return "no-live-state"
    if live.calls_at != match.frontier or not live.call_ids or live.call_ids != results.call_ids:
        return "other-calls"
    source = TOOL_OUTPUT[match.wanted.api]
    if results.turn_end is None:
        return Plan(source, match.frontier, "results") if results.alone else "history-unknown"
    history = match.wanted.key[:results.turn_end]
    if history == live.key or any(key.key == history and key.frontier == match.frontier for key in live.visible):
        return Plan(source, match.frontier, "rest", results.turn_end)
    return "history-edited"


def _same_tokens(match: _Match) -> Plan | Outcome:
    if not match.live.tokens:
        return "no-live-state"
    if match.tokens == match.frontier:
        return Plan("memory-token", match.frontier, "ids")
    return "prompt-shorter" if match.tokens == len(match.wanted.ids) else "ids-differ"


def _same_text(match: _Match) -> Plan | Outcome:
    if not match.live.key:
        return "no-live-state"
    length = len(match.live.key)
    if match.bytes < length:
        return "prompt-shorter" if match.bytes == len(match.wanted.key) else "not-a-prefix"
    if not clean_cut(match.wanted.key, length):
        return "inside-a-token"
    return Plan("memory-text", match.frontier, "rest", length)


# ---- 6 and 7: less than the whole, or another state

def _rewind(match: _Match) -> Plan | Outcome:
    """The longest earlier length that serves."""
    if not match.live.tokens:
        return "no-live-state"
    for point in sorted(match.live.points, key=lambda point: point.frontier, reverse=True):
        found = _at_point(match, point)
        if found is not None:
            return found if found.tokens >= MIN_REWIND else "too-short"
    return "no-point" if match.tokens >= MIN_REWIND else "too-short"


def _branches(beside: Sequence[tuple[Other, _Match]], least: int) -> list[Plan]:
    """The longest way by another slot's state, if it is longer than `least`."""
    found = [replace(plan, source="memory-rewind", donor=other.slot) for other, match in beside
             if isinstance(plan := _rewind(match), Plan) and plan.tokens > least]
    return sorted(found, key=lambda plan: -plan.tokens)[:1]


def _nearest(match: _Match, beside: Sequence[tuple[Other, _Match]], donor: int | None) -> tuple[Other, _Match] | None:
    """What a prompt is to be compared with: the state that it shares, else the one it has most in common with, if that
    is worth anything; None for the slot's own."""
    if donor is not None:
        return next(pair for pair in beside if pair[0].slot == donor)
    longest = max(beside, key=lambda pair: pair[1].tokens, default=None)
    return longest if longest and longest[1].tokens >= max(MIN_REWIND, match.tokens + 1) else None


def _at_point(match: _Match, point: RewindPoint) -> Plan | None:
    if point.frontier <= match.tokens:
        return Plan("memory-rewind", point.frontier, "ids")
    if point.key_bytes <= match.bytes and clean_cut(match.wanted.key, point.key_bytes):
        return Plan("memory-rewind", point.frontier, "rest", point.key_bytes)
    seen = _visible_at(match, point.frontier)
    return seen if isinstance(seen, Plan) else None


def _saved(wanted: Wanted, back: Sequence[Plan], stored: Sequence[Stored]) -> tuple[list[Plan], Outcome]:
    """The saved states worth reading beside a rewind, best first; without any, why."""
    fitting = [Plan("disk-text", saved.tokens, "rest", saved.key_bytes, saved)
               for saved in stored if clean_cut(wanted.key, saved.key_bytes)]
    least = max((plan.tokens + DISK_GAIN for plan in back), default=0)
    longer = [plan for plan in fitting if plan.tokens >= least]
    return longer[:MOST_DISK_TRIES], "barely-longer" if fitting else "inside-a-token" if stored else "no-candidate"


# ---- comparing

def clean_cut(key: bytes, at: int) -> bool:
    """Whether what follows a place in a key can be encoded apart: it lies in no control literal, mark or character.

    A state that ends with the characters `<thi` is a prefix of a prompt with a real `<think>` there, but not its state.
    """
    if not 0 < at < len(key):
        return True
    if key[at - 1] == 0xFF or key[at] & 0xC0 == 0x80:
        return False
    start = max(0, at - _LONGEST)
    return not any(found.start() < at - start < found.end() for found in _LITERAL.finditer(key[start:at + _LONGEST]))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that both have."""
    limit = min(len(a), len(b))
    for start in range(0, limit, STRIDE):
        end = min(start + STRIDE, limit)
        left, right = list(a[start:end]), list(b[start:end])
        if left != right:
            return start + next(i for i, (x, y) in enumerate(zip(left, right)) if x != y)
    return limit


def common_bytes(a: bytes, b: bytes) -> int:
    """Number of leading bytes that both have."""
    same, limit = 0, min(len(a), len(b))
    while same < limit:  # halving: each byte is compared about twice, by memcmp
        middle = (same + limit + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            limit = middle - 1
    return same
