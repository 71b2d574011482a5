"""Questions with a stated answer: a JSON object a line, checked when it is read."""
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

from ds4mlx.chat.messages import Json
from ds4mlx.errors import UsageError
from ds4mlx.evaluation.archive import archive
from ds4mlx.evaluation.checks import known_check

Kind = Literal["choice", "integer", "lines", "call", "text"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SUITES = ("core", "hard", "hard-smoke", "all")
SMOKE = 4       # every so many of the hard ones
LINE = {"choice": "<letter>", "integer": "<integer>", "lines": "<line number or comma-separated line numbers>"}
FIELDS = {"id", "suite", "source", "domain", "kind", "question", "choices", "answer", "license", "tools", "checks",
          "archive"}


@dataclass(frozen=True, slots=True)
class Case:
    """`answer`: a letter, an integer or line numbers as text; for "call" the JSON of the calls; for "text" empty, and
    `checks` decide. A question with {archive} in it holds a long text that is made when it is asked."""
    id: str
    suite: str
    source: str
    domain: str
    kind: Kind
    question: str
    answer: str = ""
    choices: tuple[str, ...] = ()
    license: str = ""
    tools: tuple[dict[str, Json], ...] = ()
    checks: tuple[dict[str, Json], ...] = ()

    def prompt(self) -> str:
        """What the model is asked."""
        parts = [self.question]
        if self.choices:
            parts.append("\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices)))
        if self.kind in LINE:
            parts.append(f"Finish with exactly one last line of the form `Answer: {LINE[self.kind]}`.")
        return "\n\n".join(parts)


def own_cases() -> list[Case]:
    """Those that come with the package."""
    text = files("ds4mlx.evaluation").joinpath("cases.jsonl").read_text("utf-8")
    return list(parse(text.splitlines(), "cases.jsonl"))


def read_cases(path: Path) -> list[Case]:
    """Raises UsageError naming the line at fault."""
    try:
        return list(parse(path.read_text("utf-8").splitlines(), str(path)))
    except (OSError, UnicodeDecodeError) as fault:
        found = getattr(fault, "strerror", None) or "not UTF-8"
        raise UsageError(f"--cases {path}: {found}; give a file of JSON lines") from fault


def parse(lines: Iterable[str], name: str) -> Iterator[Case]:
    """Raises UsageError naming the line at fault. Empty lines are none."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            case = _case(line, f"{name}: line {number}")
            if case.id in seen:
                raise UsageError(f"{name}: line {number}: a second case of the id {case.id!r}; rename one")
            seen.add(case.id)
            yield case


def _case(line: str, told: str) -> Case:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"{told}: not JSON ({fault}); one object a line") from fault
    if not isinstance(found, dict) or found.keys() - FIELDS:
        odd = sorted(found.keys() - FIELDS)[0] if isinstance(found, dict) else type(found).__name__
        raise UsageError(f"{told}: found {odd!r}, need an object of {', '.join(sorted(FIELDS))}")
    kind = found.get("kind")
    if kind not in get_args(Kind):
        raise UsageError(f"{told}: kind is {kind!r}, need one of {', '.join(get_args(Kind))}")
    for name in ("id", "question"):
        if not isinstance(found.get(name), str) or not found[name]:
            raise UsageError(f"{told}: {name} is {str(found.get(name))[:40]!r}, need text")
    case = Case(found["id"], str(found.get("suite", "core")), str(found.get("source", "own")),
                str(found.get("domain", "")), kind, _question(found, told), _answer(found.get("answer", "")),
                _texts(found.get("choices", []), f"{told}: choices"), str(found.get("license", "")),
                _objects(found.get("tools", []), f"{told}: tools"),
                _objects(found.get("checks", []), f"{told}: checks"))
    if fault := complaint(case):
        raise UsageError(f"{told}: {fault}")
    return case


def _question(found: Mapping[str, Json], told: str) -> str:
    question, wanted = str(found["question"]), found.get("archive")
    if wanted is None:
        return question
    if not (isinstance(wanted, dict) and all(isinstance(wanted.get(key), int) for key in ("records", "seed"))):
        raise UsageError(f"{told}: archive is {str(wanted)[:60]!r}, need whole numbers for records and seed")
    return question.replace("{archive}", archive(wanted["records"], wanted["seed"]))


def _answer(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _texts(value: Json, told: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{told} are {str(value)[:40]!r}, need a list of texts")
    return tuple(value)


def _objects(value: Json, told: str) -> tuple[dict[str, Json], ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"{told} are {str(value)[:40]!r}, need a list of objects")
    return tuple(value)


def complaint(case: Case) -> str | None:
    """What keeps a case from being graded; None where nothing does."""
    from ds4mlx.evaluation.grading import integer_of, lines_of
    match case.kind:
        case "choice" if not 2 <= len(case.choices) <= len(LETTERS):
            return f"{len(case.choices)} choices, need 2 to {len(LETTERS)}"
        case "choice" if case.answer not in LETTERS[:len(case.choices)] or len(case.answer) != 1:
            return f"the answer is {case.answer[:40]!r}, need a letter of its choices"
        case "integer" if integer_of(case.answer) is None:
            return f"the answer is {case.answer[:40]!r}, need an integer"
        case "lines" if not lines_of(case.answer):
            return f"the answer is {case.answer[:40]!r}, need line numbers"
        case "call" if not case.tools:
            return "no tools, need those that may be called"
        case "text" if not case.checks:
            return "no checks, need one at least"
    return next((fault for check in case.checks if (fault := known_check(check))), None)


def select(cases: Sequence[Case], suite: str, source: str | None = None, domain: str | None = None) -> list[Case]:
    """Those of a suite, of "all", or of "hard-smoke", domains of all sources taking turns."""
    found = [case for case in cases
             if suite == "all" or case.suite == ("hard" if suite == "hard-smoke" else suite)]
    found = [case for case in found if source in (None, case.source) and domain in (None, case.domain)]
    return interleaved(found[::SMOKE] if suite == "hard-smoke" else found)


def interleaved(cases: Sequence[Case]) -> list[Case]:
    """The first of each domain of each source, then the second of each: a run that is cut short has seen them all."""
    domains = list(dict.fromkeys((case.source, case.domain) for case in cases))
    columns = [[case for case in cases if (case.source, case.domain) == domain] for domain in domains]
    return [case for row in zip_longest(*columns) for case in row if case is not None]
