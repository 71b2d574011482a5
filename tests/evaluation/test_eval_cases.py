"""The cases that come with the package, and those that a user has."""
import contextlib
import io
import json
import math
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest

from ds4mlx.errors import UsageError
from ds4mlx.evaluation import importers
from ds4mlx.evaluation.archive import records
from ds4mlx.evaluation.cases import LETTERS, own_cases, parse, read_cases, select

OWN = own_cases()


def find(text):
    """The entries that a ledger in a question is made of, read back from its text."""
    pattern = r"Entry (\d+): the (\w+) brought (\d+) crates of ([\w ]+?) from \w+ to \w+, under seal (\w+)\."
    found = re.findall(pattern, text)
    return {int(entry): (ship, int(crates), goods, seal) for entry, ship, crates, goods, seal in found}


def walks(right, up):
    """All ways from (0, 0), as sets of points."""
    for ups in combinations(range(right + up), up):
        points = [(0, 0)]
        for step in range(right + up):
            x, y = points[-1]
            points.append((x, y + 1) if step in ups else (x + 1, y))
        yield set(points)


def one(**fields):
    return json.dumps({"id": "a", "kind": "integer", "question": "?", "answer": "1"} | fields)


def test_there_are_enough_of_each_domain():
    counts = Counter(case.domain for case in OWN)
    assert len(OWN) >= 60 and set(counts) == {"tools", "code", "arithmetic", "lookup", "instructions"}
    assert min(counts.values()) >= 10 and all(case.license == "MIT" for case in OWN)


@pytest.mark.parametrize("case", [case for case in OWN if "What does this Python program print?" in case.question],
                         ids=lambda case: case.id)
def test_a_program_prints_what_its_case_says(case):
    code = re.search("```python\n(.*?)```", case.question, re.DOTALL)[1]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert out.getvalue() == f"{case.answer}\n"


@pytest.mark.parametrize("case", [case for case in OWN if case.domain == "lookup" and re.search(
    r"(does entry|Under which seal is entry|of entry) \d+", case.question)], ids=lambda case: case.id)
def test_what_is_looked_up_is_in_the_text(case):
    entries, asked = find(case.question), int(re.search(r"entry (\d+)[^:]*\?", case.question)[1])
    ship, crates, _, seal = entries[asked]
    answer = case.choices[LETTERS.index(case.answer)] if case.choices else case.answer or case.checks[0]["equals"]
    assert answer in (ship, str(crates), seal)


WORKED = {
    "sum-column": 37 * 4 + 18 * 7 + 5 * 23, "product": 387 * 46, "long-division": 98765 % 37, "negative": 6 - 3 * 5 + 2,
    "percent": Fraction(240) * Fraction(115, 100) * Fraction(75, 100), "clock": 24 * 60 + 6 * 60 + 12 - (22 * 60 + 47),
    "calendar": len(range(3, 31 + 30 + 1, 9)), "average": 5 * 18 - (11 + 25 + 16 + 20), "gcd": math.gcd(1386, 1078),
    "binary": int("1101011", 2), "hexadecimal": int("3E8", 16) - int("1F", 16), "power-mod": 7 ** 42 % 100,
    "tiles": (420 // 30) * (360 // 30), "mixture": next(x for x in range(99) if 5 * (12 + x) == 2 * (60 + x)),
    "divisors": sum(7200 % n == 0 for n in range(1, 7201)), "digit-sum": sum(map(int, str(2 ** 50))),
    "paths": sum((2, 2) not in path for path in walks(5, 4)),
    "inclusion": sum((n % 4 == 0) != (n % 6 == 0) for n in range(1, 1001))}


@pytest.mark.parametrize("case", [case for case in OWN if case.domain == "arithmetic"], ids=lambda case: case.id)
def test_a_sum_comes_out_as_its_case_says(case):
    assert int(case.answer) == WORKED[case.id.removeprefix("arithmetic-")]


def test_questions_over_a_whole_ledger_are_right():
    by_id = {case.id: case for case in OWN}
    entries = find(by_id["lookup-count-400"].question).values()
    assert by_id["lookup-count-400"].answer == str(sum(e[0] == "Heron" and e[2] == "salt" for e in entries))
    entries = find(by_id["lookup-most-200"].question)
    assert by_id["lookup-most-200"].answer == str(max(entries, key=lambda number: entries[number][1]))


def test_a_ledger_is_the_same_wherever_it_is_made():
    assert records(2, 1) == records(3, 1)[:2] != records(2, 2)
    assert records(1, 1)[0]["entry"] == 1001 + int(random.Random(1).random() * 9)   # all of it is made of such draws


def test_a_prompt_says_how_to_answer():
    case, = parse([one(kind="choice", choices=["x", "y"], answer="B")], "f")
    assert case.prompt().splitlines()[2:4] == ["A. x", "B. y"] and case.prompt().endswith("`Answer: <letter>`.")


@pytest.mark.parametrize("line, told", [
    ("{", "not JSON"), ("[]", "list"), (one(kind="essay"), "'essay'"), (one(id=""), "id"), (one(answer="x"), "integer"),
    (one(color=1), "'color'"), (one(kind="choice", choices=["x"], answer="A"), "1 choices"),
    (one(kind="choice", choices=["x", "y"], answer="C"), "'C'"), (one(kind="lines", answer="-"), "line numbers"),
    (one(kind="text"), "no checks"), (one(kind="text", checks=[{"shouts": 1}]), "'shouts'"),
    (one(kind="text", checks=[{"matches": "("}]), "regular"), (one(kind="text", checks=[{"words": "x"}]), "words"),
    (one(kind="call", answer=[]), "no tools"), (one(archive={"records": "x"}), "archive"),
    (one(choices="x"), "choices")])
def test_a_case_that_cannot_be_graded_is_named_by_its_line(line, told):
    with pytest.raises(UsageError, match="f: line 2: ") as raised:
        list(parse(["", line], "f"))
    assert told in str(raised.value)


def test_two_cases_of_one_id_are_refused(tmp_path):
    (tmp_path / "c.jsonl").write_text(one() + "\n\n" + one())
    with pytest.raises(UsageError, match="line 3: a second case"):
        read_cases(tmp_path / "c.jsonl")


def test_suites_choose_and_sources_and_domains_take_turns():
    cases = [case for line in (one(id="a1"), one(id="a2"), one(id="b1", source="B"), one(id="h", suite="hard"))
             for case in parse([line], "f")]
    assert [case.id for case in select(cases, "core")] == ["a1", "b1", "a2"]
    assert [case.id for case in select(cases, "hard")] == ["h"] and len(select(cases, "all")) == 4
    assert [case.id for case in select(cases, "all", source="B")] == ["b1"]
    assert 0 < len(select(OWN, "hard-smoke")) < len(select(OWN, "hard"))
    assert len({case.domain for case in select(OWN, "core")[:5]}) == 5


def test_gpqa_is_read_with_its_choices_in_a_fixed_order(tmp_path):
    (tmp_path / "g.csv").write_text('Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,'
                                    'Record ID,High-level domain\n"Which, then?\nSay.",right,w1,w2,w3,rec1,Physics\n'
                                    'Q,right,w1,w2,w3,rec2,Biology\nQ,right,w1,w2,w3,rec3,Biology\n')
    cases = importers.read("gpqa", tmp_path / "g.csv")
    assert all(case.choices[LETTERS.index(case.answer)] == "right" for case in cases)
    assert len({case.answer for case in cases}) > 1 and cases == importers.read("gpqa", tmp_path / "g.csv")
    assert (cases[0].id, cases[0].question, cases[0].domain) == ("gpqa-rec1", "Which, then?\nSay.", "Physics")


def test_supergpqa_is_read_with_its_letters(tmp_path):
    (tmp_path / "s.jsonl").write_text(json.dumps({
        "uuid": "u1", "question": "Q", "options": ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"], "answer": "j",
        "answer_letter": "J", "discipline": "Law"}) + "\n")
    case, = importers.read("supergpqa", tmp_path / "s.jsonl")
    assert (case.id, case.answer, len(case.choices), case.source) == ("supergpqa-u1", "J", 10, "SuperGPQA")


@pytest.mark.parametrize("name, text", [("a.jsonl", '{"ID": "2025-I-1", "Problem": "P", "Answer": 70}'),
                                        ("a.json", '[{"id": "2025-I-1", "problem": "P", "answer": "070"}]'),
                                        ("a.csv", "id,question,answer\n2025-I-1,P,70\n")])
def test_aime_is_read_in_the_forms_it_goes_around_in(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    case, = importers.read("aime", tmp_path / name)
    assert (case.id, case.kind, case.question, int(case.answer)) == ("aime-2025-I-1", "integer", "P", 70)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', '[1]', '{"problem": "P", "answer": "x"}'])
def test_a_file_of_other_questions_is_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UsageError, match="a.jsonl"):
        importers.read("aime", tmp_path / "a.jsonl")
