"""Texts that extraction must get right, to be tried where ds4mlx is installed."""
from ds4mlx.evaluation.cases import Case, Kind
from ds4mlx.evaluation.grading import Said, Verdict, grade

FOUR = ("one", "two", "three", "four")
# kind, the right answer, what is said, the verdict, what is found in it
TABLE: tuple[tuple[Kind, str, str, Verdict, str], ...] = (
    ("choice", "C", "Answer: C", "passed", "C"),
    ("choice", "C", "Answer: **C**", "passed", "C"),
    ("choice", "C", "The answer is (C).", "passed", "C"),
    ("choice", "C", "An answer of A is tempting.\nAnswer: C", "passed", "C"),
    ("choice", "C", "<think>Answer: A</think>Answer: C", "passed", "C"),
    ("choice", "C", "<think>Answer: A</think>B it is", "failed", "B"),
    ("choice", "C", "Answer: D", "failed", "D"),
    ("choice", "C", "Answer: E", "incomplete", "?"),
    ("choice", "C", "ABC and CAB", "incomplete", "?"),
    ("choice", "C", "Perhaps A, or rather C", "passed", "C"),
    ("choice", "C", "", "incomplete", "?"),
    ("integer", "42", "Answer: 42", "passed", "42"),
    ("integer", "42", "Answer: 042.", "passed", "42"),
    ("integer", "42", "answer 7? No.\nAnswer: 42", "passed", "42"),
    ("integer", "-7", "Answer: -7", "passed", "-7"),
    ("integer", "-7", "Answer: \u22127", "passed", "-7"),
    ("integer", "7", "Answer: -7", "failed", "-7"),
    ("integer", "12345", "Answer: 12,345", "passed", "12345"),
    ("integer", "12", "Answer: $12$", "passed", "12"),
    ("integer", "12", "It is 11, no, 12", "passed", "12"),
    ("integer", "12", "twelve", "incomplete", "?"),
    ("lines", "9,15", "Answer: line 9", "passed", "9"),
    ("lines", "9,15", "Answer: 9 and 15", "passed", "9,15"),
    ("lines", "20-22", "Answer: 20-22", "passed", "20,21,22"),
    ("lines", "20-22", "Answer: 20-23", "failed", "20,21,22,23"),
    ("lines", "9", "Answer: none", "incomplete", "?"),
    ("lines", "9", "It is in line 9", "incomplete", "?"),
)


def wrong() -> list[str]:
    """One line for each text that is read otherwise than the table says."""
    found = []
    for kind, right, text, verdict, given in TABLE:
        case = Case("self-test", "core", "own", "", kind, "?", right, FOUR if kind == "choice" else ())
        got = grade(case, Said(text))
        if (got.verdict, got.given) != (verdict, given):
            found.append(f"{kind} {right}: {text!r} is {got.verdict} with {got.given}, need {verdict} with {given}")
    return found
