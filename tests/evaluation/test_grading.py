"""From what a model said to a verdict."""
import pytest

from ds4mlx.evaluation.cases import Case
from ds4mlx.evaluation.grading import Said, choice_of, grade, integer_in, lines_of
from ds4mlx.evaluation.selftest import wrong


def case(kind, answer="", choices=(), **more):
    return Case("c", "core", "own", "", kind, "?", answer, choices, **more)


def verdict(a_case, text, calls=(), whole=True, compat=False):
    return grade(a_case, Said(text, calls, whole), compat).verdict


def test_the_table_that_users_can_try_holds():
    assert wrong() == []


def test_ds4_takes_the_first_answer_and_we_the_last():
    text = "The answer A is tempting.\nAnswer: C"
    assert choice_of(text, 4, compat=True) == "A" and choice_of(text, 4) == "C"
    assert integer_in("answer 1\nAnswer: -1,234", compat=True) == "1"
    assert integer_in("answer 1\nAnswer: -1,234") == "-1234" and integer_in("Answer: -12", compat=True) == "12"


def test_a_letter_counts_only_in_reach_in_range_and_alone():
    assert choice_of("Answer:" + " " * 96 + "B", 4) == "B"      # as the last letter of the text
    assert choice_of("C. Answer:" + "." * 96 + "B", 4, compat=True) == "B" and choice_of("E", 4) == "?"
    assert choice_of("Answer: E", 5) == "E" and choice_of("answer ABLE, 4B, B2, _D_", 4) == "D"


def test_reasoning_is_not_graded():
    assert verdict(case("integer", "5"), "Answer: 5</think>Answer: 6") == "failed"
    assert verdict(case("integer", "5"), "6</think>Answer: 5</think>Answer: 7") == "failed"     # the first one closes
    assert verdict(case("integer", "5"), "5</think>") == "incomplete"


@pytest.mark.parametrize("text, numbers", [("line 9", {9}), ("9 and 15", {9, 15}), ("20-22", {20, 21, 22}),
                                           ("20–21, 7", {7, 20, 21}), ("lines 3 to 5", {3, 4, 5}), ("9-3", set()),
                                           ("1-99999999999", set()), ("none", set())])
def test_line_numbers_are_read_in_many_spellings(text, numbers):
    assert lines_of(text) == numbers


def test_lines_pass_when_some_are_named_and_none_but_those():
    accepts = case("lines", "4-6")
    assert [verdict(accepts, f"Answer: {said}") for said in ("5", "4,6", "5,7", "")] == [
        "passed", "passed", "failed", "incomplete"]


def test_calls_pass_in_any_order_and_by_value():
    wanted = case("call", '[{"name": "f", "arguments": {"a": 1, "b": [2]}}, {"name": "g", "arguments": {}}]')
    assert verdict(wanted, "", (("g", "{}"), ("f", '{"b": [2], "a": 1}'))) == "passed"
    assert verdict(wanted, "", (("g", "{}"), ("f", '{"b": [2], "a": "1"}'))) == "failed"
    assert verdict(wanted, "", (("g", "{}"),)) == "failed" and verdict(wanted, "so", (("g", "{"),)) == "failed"
    assert verdict(wanted, "no call", (), whole=False) == "incomplete"


def test_where_no_call_is_wanted_one_fails():
    nothing = case("call", "[]")
    assert verdict(nothing, "Paris") == "passed" and verdict(nothing, "", (("f", "{}"),)) == "failed"
    assert verdict(nothing, " ") == "incomplete"


@pytest.mark.parametrize("check, good, bad", [
    ({"equals": "a b"}, " a b\n", "a  b"), ({"contains": "b"}, "abc", "ac"), ({"lacks": "b"}, "ac", "aBc"),
    ({"matches": "a.c"}, "a\nc", "abcd"), ({"begins": "a"}, "ab", "ba"), ({"ends": "a"}, "ba", "ab"),
    ({"words": 2}, "a b", "a"), ({"words": [1, 2]}, "a", "a b c"), ({"lines": 2}, "a\n\nb", "a"),
    ({"lower": True}, "ab", "aB"), ({"upper": True}, "AB", "aB"),
    ({"json": {"a": [1]}}, '{"a":[1]}', '```{"a":[1]}```')])
def test_a_text_must_keep_every_check(check, good, bad):
    strict = case("text", checks=({"words": [0, 9]}, check))
    assert verdict(strict, good) == "passed" and verdict(strict, bad) == "failed"


def test_a_text_without_an_answer_is_incomplete():
    wanted = case("text", checks=({"lacks": "z"},))
    assert verdict(wanted, "thinking</think>") == verdict(wanted, "thinking", whole=False) == "incomplete"
