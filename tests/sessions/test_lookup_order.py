"""The sources of a prompt's state, in their order, over a toy tokenizer: one character is one token."""
import pytest

from ds4mlx.sessions.lookup import (
    Live, Plan, RewindPoint, Stored, TrailingResults, VisibleKey, Wanted, clean_cut, common_bytes, decide, still_bound,
    tool_state_gone)
from ds4mlx.text.segments import ASSISTANT, EOS, THINK_CLOSE, THINK_OPEN, USER

SYSTEM = "You are an agent. " * 8                      # 144 tokens
TURN = f"{SYSTEM}{USER}Q{ASSISTANT}{THINK_OPEN}"
STATE = f"{TURN}hidden{THINK_CLOSE}I look.{EOS}"       # what the model computed
SHOWN = f"{TURN}{THINK_CLOSE}I look.{EOS}"             # what a client sends back of it
RESULTS = f"{USER}<tool_result>R</tool_result>{ASSISTANT}{THINK_OPEN}"
CALLS = frozenset({"call_a", "call_b"})


def ids(text):
    return [ord(character) for character in text]


def in_pairs(text):
    """The same text in other tokens."""
    pairs = [text[i:i + 2] for i in range(0, len(text), 2)]
    return [ord(pair[0]) << 21 | ord(pair[-1]) for pair in pairs]


def wanted(text, api="chat", tokens=None, **more):
    return Wanted(ids(text) if tokens is None else tokens, text.encode(), api, **more)


def point(frontier, text=STATE):
    return RewindPoint(frontier, len(text[:frontier].encode()))


def live(text=STATE, shown=(), **more):
    kinds = "thinking-visible", "responses-visible"
    keys = tuple(VisibleKey(key.encode(), kind, len(text)) for key in shown for kind in kinds)
    return Live(ids(text), text.encode(), keys, **more)


def results(text, **more):
    return TrailingResults(CALLS, len(text.encode()), **more)


def after_calls(shown=(SHOWN,)):
    return live(shown=shown, call_ids=CALLS, calls_at=len(STATE))


def took(decision):
    return decision.best.source, decision.best.tokens


ALL = len(STATE)
SOURCES = {
    "the same tokens": (wanted(STATE + RESULTS), live(), ("memory-token", ALL)),
    "the same tokens and no more": (wanted(STATE), live(), ("memory-token", ALL)),
    "the same text": (wanted(STATE + RESULTS, tokens=in_pairs(STATE + RESULTS)), live(), ("memory-text", ALL)),
    "the same text and no more": (wanted(STATE, tokens=in_pairs(STATE)), live(), ("memory-text", ALL)),
    "what a client shows": (wanted(SHOWN + RESULTS), live(shown=[SHOWN]), ("thinking-visible", ALL)),
    "what it shows of another shape": (wanted(SHOWN + RESULTS), live(shown=[STATE, SHOWN]), ("thinking-visible", ALL)),
    "what it shows by Anthropic's API": (wanted(SHOWN + RESULTS, "anthropic"), live(shown=[SHOWN]),
                                         ("thinking-visible", ALL)),
    "what Codex shows": (wanted(SHOWN + RESULTS, "responses"), live(shown=[SHOWN]), ("responses-visible", ALL)),
    "results by the chat API": (wanted(SHOWN + RESULTS, results=results(SHOWN)), after_calls(),
                                ("chat-tool-output", ALL)),
    "results by Anthropic's API": (wanted(SHOWN + RESULTS, "anthropic", results=results(SHOWN)), after_calls(),
                                   ("anthropic-tool-output", ALL)),
    "results with all reasoning": (wanted(STATE + RESULTS, results=results(STATE)), after_calls(()),
                                   ("chat-tool-output", ALL)),
    "results of Codex, shown whole": (wanted(SHOWN + RESULTS, "responses", results=results(SHOWN)), after_calls(),
                                      ("responses-visible", ALL)),
    "results of Codex, alone": (wanted(RESULTS, "responses", results=TrailingResults(CALLS, alone=True)),
                                after_calls(), ("responses-tool-output", ALL)),
    "an earlier length": (wanted(TURN), live(points=(point(70), point(len(TURN)))), ("memory-rewind", len(TURN))),
    "an earlier length in other tokens": (wanted(TURN, tokens=in_pairs(TURN)), live(points=(point(len(SYSTEM)),)),
                                          ("memory-rewind", len(SYSTEM))),
    "nothing": (wanted("another"), live(points=(point(70),)), ("none", 0)),
    "nothing to begin with": (wanted(TURN), Live(), ("none", 0)),
    "raw completion of the same text": (wanted(STATE + "x", "completions", tokens=in_pairs(STATE + "x")),
                                        live(shown=[SHOWN]), ("memory-text", ALL)),
}


@pytest.mark.parametrize("request_, state, expected", SOURCES.values(), ids=SOURCES)
def test_a_prompt_goes_on_from(request_, state, expected):
    decision = decide(request_, state)
    assert took(decision) == expected
    assert [verdict.source for verdict in decision.verdicts if verdict.outcome == "taken"] == [expected[0]]


ORDER = ["responses-visible", "responses-tool-output", "memory-token", "memory-text", "memory-rewind", "none"]


def test_sources_are_tried_in_order_and_all_misses_told():
    verdicts = decide(wanted("another", "responses", results=results("a")), live()).verdicts
    assert [verdict.source for verdict in verdicts if verdict.source != "disk-text"] == ORDER
    assert [verdict.outcome for verdict in verdicts] == [
        "no-key", "other-calls", "ids-differ", "not-a-prefix", "too-short", "no-candidate", "taken"]


def test_a_state_in_memory_wins_over_any_on_disk():
    assert took(decide(wanted(STATE + RESULTS), live(), [Stored("f", ALL + 1, ALL)])) == ("memory-token", ALL)


MISSES = {
    "of a visible key of another length": (wanted(SHOWN + RESULTS), Live(ids(STATE), STATE.encode(), (
        VisibleKey(SHOWN.encode(), "thinking-visible", ALL - 1),)), "thinking-visible", "stale-key"),
    "of a visible key with nothing after it": (wanted(SHOWN), live(shown=[SHOWN]), "thinking-visible",
                                               "nothing-to-add"),
    "of an edited answer": (wanted(SHOWN.replace("look", "see") + RESULTS), live(shown=[SHOWN]), "thinking-visible",
                            "not-a-prefix"),
    "of a shorter prompt": (wanted(TURN), live(), "memory-token", "prompt-shorter"),
    "of a shorter prompt's text": (wanted(TURN), live(), "memory-text", "prompt-shorter"),
    "of other results": (wanted(SHOWN, results=TrailingResults(frozenset({"call_a"}), 5)), after_calls(),
                         "chat-tool-output", "other-calls"),
    "of results of an earlier answer": (wanted(SHOWN, results=results(SHOWN)), live(
        shown=[SHOWN], call_ids=CALLS, calls_at=ALL - 9), "chat-tool-output", "other-calls"),
    "of results without calls": (wanted(SHOWN), after_calls(), "chat-tool-output", "no-tool-results"),
    "of a state that is not there": (wanted(SHOWN, results=results(SHOWN)), Live(), "chat-tool-output",
                                     "no-live-state"),
    "of the longest length, being short": (wanted(SYSTEM[:80]), live(points=(point(20),)), "memory-rewind",
                                           "too-short"),
    "of a length to go back to": (wanted(SYSTEM), live(), "memory-rewind", "no-point"),
}


@pytest.mark.parametrize("request_, state, source, outcome", MISSES.values(), ids=MISSES)
def test_a_miss_is_told(request_, state, source, outcome):
    assert {verdict.source: verdict.outcome for verdict in decide(request_, state).verdicts}[source] == outcome


EDITED = SHOWN.replace("Q", "Q2")
HISTORIES = [(SHOWN, "chat-tool-output"), (STATE, "chat-tool-output"), (EDITED, "none"), (SHOWN[144:], "none")]


@pytest.mark.parametrize("history, source", HISTORIES)
def test_results_count_only_after_the_history_that_the_state_has(history, source):
    decision = decide(wanted(history + RESULTS, results=results(history)), after_calls())
    assert decision.best.source == source


def test_results_go_on_right_after_the_turn_that_made_the_calls():
    request = wanted(SHOWN + RESULTS + "more", results=results(SHOWN))
    end = len(SHOWN.encode())
    assert decide(request, after_calls()).best == Plan("chat-tool-output", ALL, "rest", end)
    alone = wanted(RESULTS, "responses", results=TrailingResults(CALLS, alone=True))
    assert decide(alone, after_calls()).plans == (Plan("responses-tool-output", ALL, "results"),)


GONE = {"no state": Live(), "another state": live(), "the state of an edited history": None}


@pytest.mark.parametrize("state", GONE.values(), ids=GONE)
@pytest.mark.parametrize("api", ["chat", "anthropic", "responses"])
def test_results_whose_calls_nobody_has_are_refused_with_409(api, state):
    lone = TrailingResults(CALLS, alone=state is not None)
    decision = decide(wanted(RESULTS, api, results=lone), after_calls(()) if state is None else state,
                      [Stored("f", 5000, 9)])
    assert decision.plans == () and decision.best is None
    error = tool_state_gone(lone)
    assert (error.status, error.code) == (409, "continuation_state_unavailable")


KINDS = [("chat", "responses-visible"), ("anthropic", "responses-visible"), ("responses", "thinking-visible"),
         ("completions", "thinking-visible")]


@pytest.mark.parametrize("api, kind", KINDS)
def test_a_visible_key_serves_the_api_that_it_was_made_for(api, kind):
    state = Live(ids(STATE), STATE.encode(), (VisibleKey(SHOWN.encode(), kind, ALL),))
    assert decide(wanted(SHOWN + RESULTS, api), state).best.source == "none"


def test_a_visible_key_of_a_rewind_point_leads_back_to_it():
    later = STATE + RESULTS + "aborted"
    key = VisibleKey(SHOWN.encode(), "thinking-visible", ALL)
    state = Live(ids(later), later.encode(), (key,), (point(144, later), point(ALL, later)))
    best = decide(wanted(f"{SHOWN}{USER}Steer{ASSISTANT}"), state).best
    assert best == Plan("memory-rewind", ALL, "rest", len(SHOWN.encode()))


def test_keys_beyond_a_rewind_are_bound_no_more():
    keys = [VisibleKey(b"a", "thinking-visible", n) for n in (100, 200, 300)]
    assert still_bound(keys, 200) == tuple(keys[:2])


DISK = [(144, 144 + 255, "memory-rewind"), (144, 144 + 256, "disk-text"), (144, 100, "memory-rewind"),
        (None, 512, "disk-text")]


@pytest.mark.parametrize("back, saved, source", DISK)
def test_a_saved_state_is_read_for_256_tokens_more(back, saved, source):
    state = live(points=(point(back),) if back else ())
    decision = decide(wanted(SYSTEM + "x" * 900), state, [Stored("f", saved, saved)])
    assert decision.best.source == source


def test_a_saved_state_that_fails_is_followed_by_the_next_best():
    files = [Stored(name, tokens, tokens) for name, tokens in [("a", 900), ("b", 800), ("c", 700), ("d", 600)]]
    plans = decide(wanted(SYSTEM + "x" * 900), live(points=(point(144),)), files).plans
    assert [plan.stored.name if plan.stored else plan.source for plan in plans] == ["a", "b", "c", "memory-rewind",
                                                                                   "none"]


@pytest.mark.parametrize("tokens, source", [(63, "none"), (64, "memory-rewind")])
def test_going_back_takes_64_tokens_at_least(tokens, source):
    assert decide(wanted(SYSTEM[:tokens] + "?"), live(points=(point(tokens),))).best.source == source


CUTS = [("ab", 1, True), (f"a{USER}b", 1, True), (f"a{USER}b", 1 + len(USER.encode()), True), (f"a{USER}b", 4, False),
        ("中", 1, False), ("中文", 3, True), (b"a\xff<think>", 1, True), (b"a\xff<think>", 2, False), ("<think", 3, True),
        (THINK_OPEN, 0, True), (THINK_OPEN, 7, True), (f"{'x' * 50}{EOS}{'x' * 50}", 60, False)]


@pytest.mark.parametrize("key, at, clean", CUTS)
def test_a_key_is_cut_between_characters_and_control_tokens(key, at, clean):
    assert clean_cut(key if isinstance(key, bytes) else key.encode(), at) is clean


@pytest.mark.parametrize("length", [0, 1, 2, 1000, 4097])
def test_common_bytes_end_at_the_first_difference(length):
    same = bytes(i % 251 for i in range(length))
    assert common_bytes(same + b"a1", same + b"b1") == length == common_bytes(same, same + b"b")
