"""When to save, which checkpoint to try first and which to delete: the trouble that users report, as cases."""
import pytest

from ds4mlx.sessions.policy import (
    HOUR_S, MOST_LINEAGES, Boundary, Directory, Entry, ReloadGuard, SaveRules, Stray, candidate_rank, crosses, forks,
    prefill_boundaries, quarantine_excess, recent_hits, score, victims, waypoints, why_not_save)

NOW = 2e9
MB = 1 << 20
FIXED = 8 * MB
ROW = 3500  # packed bytes a token
RULES = SaveRules()


def entry(name, tokens=20_000, reason="evict", *, size=None, age_h=1.0, used_h=None, **fields):
    """A checkpoint without segments, as large as its tokens make it."""
    size = FIXED + tokens * ROW if size is None else size
    used = 0 if used_h is None else NOW - used_h * HOUR_S
    return Entry(name=name, tokens=tokens, tokens_sha1=name, reason=reason, created=NOW - age_h * HOUR_S,
                 own_bytes=size, last_used=used, **fields)


def first_to_go(*entries, **fields):
    return victims(Directory(entries, fixed_bytes=FIXED, **fields), 1, NOW).names[0]


def places(*arguments, **fields):
    return [(b.tokens, b.reason) for b in prefill_boundaries(RULES, *arguments, **fields)]


# ---- where to save

@pytest.mark.parametrize("prompt,anchor,reused,expected", [
    (600, None, 0, []),                                          # aligned down, nothing is left
    (2100, None, 0, [(2048, "cold")]),
    (2079, None, 0, []),                                         # the last 32 tokens may be spelled otherwise next time
    (2100, 600, 0, [(600, "cold")]),                             # the tail is too close behind the anchor
    (4700, 600, 0, [(600, "cold")]),
    (4800, 600, 0, [(600, "cold")]),
    (6200, 600, 0, [(600, "cold"), (6144, "cold")]),
    (2100, 511, 0, [(2048, "cold")]),                            # an anchor below the minimum counts as missing
    (6200, 600, 300, [(600, "cold"), (6144, "cold")]),           # reused, but not up to the anchor
    (6200, 600, 600, []),                                        # the anchor is on disk or in memory
    (6200, None, 64, []),
    (6200, 5000, 0, [(5000, "cold")]),
])
def test_a_cold_prefill_saves_its_anchor_and_its_aligned_tail(prompt, anchor, reused, expected):
    assert places(prompt, anchor, reused) == expected


def test_the_limit_of_cold_saves_is_on_the_place_not_on_the_prompt():
    assert places(35_000, 20_000, 0) == [(10_240, "continued"), (20_000, "cold"), (20_480, "continued"),
                                         (30_720, "continued")]


@pytest.mark.parametrize("parted, reused, stable", [
    (0, 0, None), (4700, 0, 4608), (4640, 0, 4608), (4639, 0, 4480),   # 32 tokens back, then to a multiple of 128
    (600, 0, 512), (671, 0, 512), (540, 0, None),                      # too short to be loaded
    (8800, 0, None),                                                   # barely ahead of the anchor
    (4700, 4096, 4608), (4700, 4608, None), (50_000, 0, None)])
def test_a_place_ahead_of_what_changes_in_the_system_text_is_saved(parted, reused, stable):
    anchor = 9000
    expected = [(stable, "cold")] if stable else []
    assert places(9500, anchor, reused, parted=parted) == [*expected, (anchor, "cold")]


def test_without_a_task_to_come_nothing_is_known_to_change():
    assert places(9500, None, 0, parted=4700) == places(9500, None, 0)


def test_no_cold_saves_when_they_are_switched_off():
    assert prefill_boundaries(SaveRules(cold_max=0, interval=0), 9000, 700, 0) == []


def test_a_cold_place_that_is_also_a_continued_one_is_saved_once():
    assert places(10_300, None, 0) == [(10_240, "cold")]


@pytest.mark.parametrize("reused,expected", [
    (0, [10_240, 20_480]), (10_240, [20_480]), (15_001, [20_480]), (20_480, [])])
def test_continued_saves_follow_the_step_from_any_start(reused, expected):
    assert [b.tokens for b in prefill_boundaries(SaveRules(cold_max=0), 25_000, None, reused)] == expected


def test_continued_saves_wait_for_the_end_of_a_chunk():
    assert prefill_boundaries(SaveRules(cold_max=0), 12_500, None, 0, chunk=4096) == [Boundary(12_288, "continued")]


def test_a_last_short_chunk_that_crosses_is_saved_at_its_end():
    assert prefill_boundaries(SaveRules(cold_max=0), 10_400, None, 0, chunk=4096) == [Boundary(10_400, "continued")]


@pytest.mark.parametrize("before,frontier,expected", [
    (10_239, 10_240, True), (10_240, 10_241, False), (10_001, 10_300, True), (0, 10_239, False), (9_999, 31_000, True)])
def test_decoding_saves_when_it_reaches_or_passes_a_step(before, frontier, expected):
    assert crosses(RULES, before, frontier) is expected


def test_a_step_is_a_whole_number_of_segments():
    assert (RULES.step, SaveRules(interval=2048).step, SaveRules(interval=0).step) == (10_240, 2048, 0)
    assert SaveRules(interval=1000, align=0).step == 1000


@pytest.mark.parametrize("reason,frontier,covered,saved", [
    ("cold", 511, 0, False), ("cold", 512, 0, True),
    ("evict", 20_512, 20_000, False), ("evict", 20_513, 20_000, True),
    ("continued", 20_480, 20_000, False), ("continued", 20_480, 0, True),
    ("shutdown", 20_001, 20_000, True), ("shutdown", 20_000, 20_000, False),
    ("cold", 20_100, 20_000, True),
])
def test_a_state_that_disk_has_nearly_whole_is_not_written_again(reason, frontier, covered, saved):
    assert (why_not_save(RULES, reason, frontier, covered) is None) is saved


# ---- which to try first

def test_candidates_are_tried_by_tokens_then_kind_then_quant_then_length_of_text():
    best_first = [(3000, "thinking-visible", False, 10), (2000, "token-text", True, 75), (2000, "token-text", True, 70),
                  (2000, "token-text", False, 80), (2000, "responses-visible", True, 90)]
    assert sorted(best_first[::-1], key=lambda c: candidate_rank(*c)) == best_first


# ---- what to delete

def test_prefixes_of_requests_that_wait_and_pinned_files_are_never_deleted():
    assert first_to_go(entry("wanted", 600, "continued"), entry("other"), keep={"wanted"}) == "other"
    assert victims(Directory([entry("wanted")], keep={"wanted"}), 1, NOW) == victims(Directory([]), 1, NOW)


def test_of_nested_continued_saves_the_older_waypoint_goes():
    first = entry("10k", 10_240, "continued", age_h=2)
    last = entry("20k", 20_480, "continued", age_h=1, ancestors=frozenset({"10k"}))
    assert first_to_go(last, first) == "10k"


def test_a_waypoint_of_the_incoming_save_goes_before_another_conversation():
    mine, other = entry("mine", 20_480, "continued", age_h=0), entry("other", 20_480, "continued", age_h=5)
    assert first_to_go(mine, other, incoming={"mine"}) == "mine"


def test_a_waypoint_that_is_hit_again_and_again_is_worth_more():
    used, unused = (entry(str(n), reason="continued", hits=n, used_h=0) for n in (50, 0))
    ratio = score(used, 1e8, 0, NOW, waypoint=True) / score(used, 1e8, 0, NOW)
    assert ratio == pytest.approx(0.05 + 0.45 * 50 / 51) and score(unused, 1e8, 0, NOW, waypoint=True) == \
        pytest.approx(0.05 * score(unused, 1e8, 0, NOW))


@pytest.mark.parametrize("kept,gone", [("cold", "continued"), ("cold", "evict"), ("cold", "shutdown"),
                                       ("agent-system", "evict"), ("evict", "continued")])
def test_anchors_outlast_dumps_and_dumps_outlast_waypoints(kept, gone):
    assert first_to_go(entry("kept", reason=kept), entry("gone", reason=gone)) == "gone"


def test_a_short_shared_prefix_outlasts_a_long_dump():
    short = entry("short", 1000, "cold")
    assert first_to_go(short, entry("long", 100_000, "evict")) == "long"
    # The same two without the correction for what every checkpoint costs: the short one would go.
    assert victims(Directory([short, entry("long", 100_000, "evict")], fixed_bytes=0), 1, NOW).names == ("short",)


def test_a_prefix_that_two_conversations_share_is_worth_twice_as_much():
    shared, alone = entry("shared", reason="cold"), entry("alone", reason="cold")
    left = entry("left", 30_000, ancestors=frozenset({"shared"}))
    right = entry("right", 31_000, ancestors=frozenset({"shared"}))
    assert forks([shared, alone, left, right]) == {"shared"}
    assert score(shared, 1e8, 0, NOW, fork=True) == 2 * score(alone, 1e8, 0, NOW)


def test_one_conversation_saved_twice_is_no_fork():
    one = entry("one", 30_000, ancestors=frozenset({"root"}))
    two = entry("two", 40_000, ancestors=frozenset({"root", "one"}))
    assert forks([entry("root"), two, one]) == set()


def test_an_anchor_used_last_week_outlasts_a_dump_of_yesterday():
    anchor = entry("anchor", 3000, "cold", hits=4, used_h=7 * 24, age_h=30 * 24)
    dump = entry("dump", 80_000, "evict", age_h=24)
    assert recent_hits(anchor, NOW) == pytest.approx(2) and first_to_go(anchor, dump) == "dump"


def test_a_smaller_budget_at_boot_keeps_the_anchors():
    anchors = [entry(f"anchor{i}", 3000, "cold", hits=4, used_h=100) for i in range(3)]
    dumps = [entry(f"dump{i}", 80_000, "evict", age_h=i) for i in range(3)]
    gone = victims(Directory([*anchors, *dumps], fixed_bytes=FIXED), sum(d.own_bytes for d in dumps), NOW)
    assert gone.names == ("dump2", "dump1", "dump0")


def test_hits_of_a_dump_are_forgotten_in_hours():
    assert recent_hits(entry("x", hits=8, used_h=12), NOW) == pytest.approx(2)
    assert recent_hits(entry("x", hits=8, used_h=72), NOW) == 0


def test_a_clock_set_back_makes_nothing_younger_than_now():
    assert recent_hits(entry("x", hits=8, used_h=-500), NOW) == 8


def test_ties_go_to_the_one_used_longer_ago_then_to_the_larger():
    assert first_to_go(entry("new", age_h=1), entry("old", age_h=2)) == "old"
    small, large = (entry(n, 10, size=s) for n, s in (("small", 16 * MB), ("large", 16 * MB + 1)))
    assert victims(Directory([small, large], fixed_bytes=0), 1, NOW).names == ("large",)


def test_strays_go_first_and_the_oldest_of_them_before_the_others():
    strays = [Stray("new", MB, NOW), Stray("old", MB, NOW - 9), Stray("kept", MB, 0)]
    gone = victims(Directory([entry("x")], strays=strays, keep={"kept"}), 2 * MB + 1, NOW)
    assert gone.names == ("old", "new", "x") and gone.freed_bytes == 2 * MB + entry("x").own_bytes


def test_saved_agent_sessions_are_never_deleted():
    assert victims(Directory([entry("mine", reason="agent-session")]), 1, NOW).names == ()


# ---- segments

def test_deleting_a_head_frees_only_the_segments_it_alone_uses():
    heads = [entry("a", size=MB, segments=("s", "t"), reason="continued"), entry("b", size=MB, segments=("s",))]
    gone = victims(Directory(heads, {"s": 7 * MB, "t": 5 * MB}), 1, NOW)
    assert (gone.names, gone.freed_bytes) == (("a",), 6 * MB)


def test_deleting_all_users_of_a_segment_frees_it():
    heads = [entry(n, size=MB, segments=("s",)) for n in "ab"]
    assert victims(Directory(heads, {"s": 7 * MB}), 2 * MB, NOW).freed_bytes == 9 * MB


def test_segments_of_a_save_in_progress_free_nothing():
    assert victims(Directory([entry("a", size=MB, segments=("s",))], {"s": 7 * MB}, keep_segments={"s"}), MB + 1,
                   NOW).freed_bytes == MB


def test_a_shared_segment_costs_each_of_its_heads_a_part():
    shared = [entry(n, size=MB, segments=("s",), age_h=1) for n in "ab"]
    alone = entry("c", size=MB, segments=("t",), age_h=1)
    assert first_to_go(*shared, alone, segment_bytes={"s": 70 * MB, "t": 70 * MB}) == "c"


def test_a_waypoint_needs_a_newer_continuation():
    old, new = entry("old", age_h=2), entry("new", age_h=1, ancestors=frozenset({"old"}))
    assert waypoints([old, new]) == {"old"}
    assert waypoints([entry("old", age_h=0), new]) == set()


# ---- quarantine and loops

def test_quarantine_keeps_eight_files_and_a_gibibyte():
    files = [Stray(str(i), MB, i) for i in range(10)]
    assert quarantine_excess(files) == ["1", "0"]
    assert quarantine_excess([Stray("new", 600 * MB, 2), Stray("old", 600 * MB, 1)]) == ["old"]


A, B = b"one prompt", b"another one"


def test_a_file_restored_twice_without_progress_is_left_alone_for_ten_minutes():
    guard = ReloadGuard()
    guard.restored(0, A, "x", 900, NOW)
    assert guard.blocked(A, NOW) == {}
    guard.restored(0, A, "x", 900, NOW + 1)
    assert guard.blocked(A, NOW + 2).keys() == {"x"} and guard.blocked(B, NOW + 2) == {}
    assert guard.blocked(A, NOW + 602) == guard.blocked(A, NOW - 1e6) == {}


def test_a_loop_is_one_in_whichever_slot_it_turns():
    guard = ReloadGuard()
    guard.restored(0, A, "x", 900, NOW)
    guard.restored(1, A, "x", 900, NOW + 1)
    assert guard.blocked(A, NOW + 2).keys() == {"x"}


def test_a_file_restored_again_after_its_slot_went_on_is_no_loop():
    guard = ReloadGuard()
    guard.restored(0, A, "x", 900, NOW)
    guard.continued(0)
    guard.restored(0, A, "x", 900, NOW + 1)
    assert guard.blocked(A, NOW + 2) == {}


def test_what_another_slot_does_is_no_progress():
    guard = ReloadGuard()
    guard.restored(0, A, "x", 900, NOW)
    guard.continued(1)
    guard.restored(0, A, "x", 900, NOW + 1)
    assert guard.blocked(A, NOW + 2).keys() == {"x"}


def test_a_file_that_failed_is_left_alone_by_all():
    guard = ReloadGuard()
    guard.failed("x", "the disk is broken", NOW)
    assert guard.blocked(A, NOW + 599) == guard.blocked(B, NOW) == {"x": "the disk is broken"}
    assert guard.blocked(A, NOW + 601) == {}


def test_prompts_of_long_ago_are_forgotten():
    guard = ReloadGuard()
    for number in range(MOST_LINEAGES + 1):
        guard.restored(0, b"%d" % number, "x", 900, NOW)
    guard.restored(0, b"0", "x", 900, NOW)
    guard.restored(0, b"%d" % MOST_LINEAGES, "x", 900, NOW)
    assert guard.blocked(b"0", NOW) == {} and guard.blocked(b"%d" % MOST_LINEAGES, NOW)
