"""Questions of others, from files that the user has: read where they lie, and never written anywhere."""
import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ds4mlx.errors import UsageError
from ds4mlx.evaluation.cases import LETTERS, Case, complaint

Record = Mapping[str, object]       # a line of a file, its keys in lower case


def read(name: str, path: Path) -> list[Case]:
    """The cases of a file of one of IMPORTERS. Raises UsageError naming the record at fault."""
    cases = []
    for number, record in enumerate(_records(path), 1):
        told = f"--{name} {path}: record {number}"
        try:
            case = IMPORTERS[name](record, number)
        except (KeyError, TypeError, ValueError) as fault:
            raise UsageError(f"{told}: no case of {name} ({fault!r}); it has {', '.join(record)[:200]}") from fault
        if fault := complaint(case):
            raise UsageError(f"{told}: {fault}")
        cases.append(case)
    if not cases:
        raise UsageError(f"--{name} {path}: holds no records; give the file as it is published")
    return cases


def _records(path: Path) -> list[Record]:
    """CSV by its name, else JSON: an array, or an object a line."""
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix.lower() == ".csv":
            found: Sequence[object] = list(csv.DictReader(text.splitlines(keepends=True)))
        elif text.lstrip().startswith("["):
            found = json.loads(text)
        else:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as fault:
        raise UsageError(f"{path}: {fault.strerror}; give a file that you have") from fault
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"{path}: neither JSON nor, by its name, CSV ({fault}); give the file as published") from fault
    if not all(isinstance(record, dict) for record in found):
        raise UsageError(f"{path}: not a list of objects; give the file as it is published")
    return [{str(key).lower(): value for key, value in record.items()} for record in found]


def _gpqa(record: Record, number: int) -> Case:
    """Choices come in an order of their own, the same every time: the file has the right one first."""
    right = _text(record["correct answer"])
    choices = [right, *(_text(record[f"incorrect answer {i}"]) for i in (1, 2, 3))]
    name = _text(record.get("record id") or number)
    choices.sort(key=lambda choice: hashlib.sha256(f"{name} {choice}".encode()).digest())
    return Case(f"gpqa-{name}", "core", "GPQA", _text(record.get("high-level domain") or ""), "choice",
                _text(record["question"]), LETTERS[choices.index(right)], tuple(choices), "CC BY 4.0")


def _supergpqa(record: Record, number: int) -> Case:
    options = record["options"]
    if not isinstance(options, list):
        raise ValueError("options are no list")
    letter = record.get("answer_letter") or LETTERS[[_text(o) for o in options].index(_text(record["answer"]))]
    return Case(f"supergpqa-{record.get('uuid') or number}", "core", "SuperGPQA",
                _text(record.get("discipline") or ""), "choice", _text(record["question"]), _text(letter),
                tuple(map(_text, options)), "ODC-BY")


def _aime(record: Record, number: int) -> Case:
    question = record.get("problem") or record["question"]
    name = record.get("id") or record.get("problem_idx") or number
    return Case(f"aime-{name}", "core", "AIME", "mathematics", "integer", _text(question), _text(record["answer"]))


def _text(value: object) -> str:
    return str(value).strip()


IMPORTERS: dict[str, Callable[[Record, int], Case]] = {"gpqa": _gpqa, "supergpqa": _supergpqa, "aime": _aime}
