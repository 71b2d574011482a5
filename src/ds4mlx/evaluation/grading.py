"""Was it right? From what a model said, its answer, and from the answer a verdict.

The last "answer" in the text counts, where ds4 takes the first; `compat` grades as ds4 does. Text in which nothing is
found that could be an answer is incomplete, which is not passed either.
"""
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ds4mlx.evaluation.cases import LETTERS, Case
from ds4mlx.evaluation.checks import failed
from ds4mlx.text.segments import THINK_CLOSE

Verdict = Literal["passed", "failed", "incomplete"]
CHOICE_REACH, INTEGER_REACH = 96, 160       # characters after "answer" in which it is looked for
NONE = "?"
_ANSWER = re.compile("answer", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\d{1,3}(?:,\d{3})+(?!\d)|(?<![\w.])[-\u2212]\d+|\d+")
_RANGE = re.compile(r"(\d+)\s*(?:-|–|—|to|through)\s*(\d+)|(\d+)", re.IGNORECASE)
MOST_LINES = 1000       # of a range: a larger one names no lines


@dataclass(frozen=True, slots=True)
class Grade:
    """given: the answer as it was found, "?" where there is none."""
    verdict: Verdict
    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class Said:
    """text: all of an answer, its reasoning up to THINK_CLOSE; calls: name and arguments (JSON) of tool calls."""
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    whole: bool = True      # it ended by itself


def grade(case: Case, said: Said, compat: bool = False) -> Grade:
    text = visible(said.text)
    match case.kind:
        case "choice":
            given, expected = choice_of(text, len(case.choices), compat), case.answer
        case "integer":
            given, expected = integer_in(text, compat) or NONE, integer_of(case.answer) or case.answer
        case "lines":
            return _grade_lines(case, text)
        case "call":
            return _grade_calls(case, said)
        case "text":
            return _grade_text(case, said, text)
    return Grade("incomplete" if given == NONE else "passed" if given == expected else "failed", given, expected)


def visible(text: str) -> str:
    """What follows the first THINK_CLOSE; all of it where there is none."""
    return text.partition(THINK_CLOSE)[2] if THINK_CLOSE in text else text


def choice_of(text: str, count: int, compat: bool = False) -> str:
    """A letter of the first `count`, alone among its neighbours, near "answer", else the last in the text."""
    upper = re.compile(rf"(?<![^\W_])[A-{LETTERS[count - 1]}](?![^\W_])")
    places = [found.end() for found in _ANSWER.finditer(text)]
    for place in places[:1] if compat else reversed(places):
        if found := upper.search(text[:place + CHOICE_REACH], place):
            return found[0]
    letters = upper.findall(text)
    return letters[-1] if letters else NONE


def integer_in(text: str, compat: bool = False) -> str | None:
    """The first number near "answer", else the last in the text, as `integer_of` writes it."""
    pattern = re.compile(r"\d+") if compat else _NUMBER
    places = [found.end() for found in _ANSWER.finditer(text)]
    for place in places[:1] if compat else reversed(places):
        if found := pattern.search(text[:place + INTEGER_REACH], place):
            return integer_of(found[0])
    numbers = pattern.findall(text)
    return integer_of(numbers[-1]) if numbers else None


def integer_of(text: str) -> str | None:
    """Without leading zeros and thousands separators; None where it is no integer."""
    bare = text.strip().replace(",", "").replace("\u2212", "-")
    return str(int(bare)) if re.fullmatch(r"-?\d{1,1000}", bare) else None


def lines_of(text: str) -> frozenset[int]:
    """Numbers of "line 9", "9 and 15", "20-22"."""
    found: set[int] = set()
    for begin, end, one in _RANGE.findall(text):
        first, last = (int(begin), int(end)) if begin else (int(one), int(one))
        if first <= last < first + MOST_LINES:
            found.update(range(first, last + 1))
    return frozenset(found)


def _grade_lines(case: Case, text: str) -> Grade:
    """Right when something is named, and nothing but what may be."""
    places = [found.end() for found in _ANSWER.finditer(text)]
    given = lines_of(text[places[-1]:].strip().partition("\n")[0]) if places else frozenset()
    shown = ",".join(map(str, sorted(given))) or NONE
    verdict: Verdict = "incomplete" if not given else "passed" if given <= lines_of(case.answer) else "failed"
    return Grade(verdict, shown, case.answer)


def _grade_calls(case: Case, said: Said) -> Grade:
    """Right when the calls are those that are wanted, in any order: none where none is wanted."""
    given = [[name, _value(arguments)] for name, arguments in said.calls]
    wanted = [[call["name"], call["arguments"]] for call in json.loads(case.answer or "[]")]
    shown = json.dumps(given, ensure_ascii=False) if given else NONE
    same = _ordered(given) == _ordered(wanted)
    cut = not given and (not said.whole or not visible(said.text).strip())
    return Grade("incomplete" if cut else "passed" if same else "failed", shown, json.dumps(wanted, ensure_ascii=False))


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _ordered(calls: Sequence[object]) -> list[str]:
    return sorted(json.dumps(call, sort_keys=True) for call in calls)


def _grade_text(case: Case, said: Said, text: str) -> Grade:
    missed = failed(text, case.checks)
    empty = not text.strip() or THINK_CLOSE not in said.text and not said.whole
    shown = " ".join(text.split())[:60] or NONE
    return Grade("incomplete" if empty else "failed" if missed else "passed", shown, "; ".join(missed) or "its checks")
