"""What was asked and said, a JSON object a line: enough to be graded again without a model."""
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ds4mlx.errors import Ds4Error, UsageError
from ds4mlx.evaluation.asking import Answered
from ds4mlx.evaluation.cases import Case, complaint
from ds4mlx.evaluation.grading import Grade, Said


@dataclass(frozen=True, slots=True)
class Record:
    """One case. prompt_tokens: of the rendered prompt."""
    case: Case
    said: Said
    grade: Grade
    prompt_tokens: int
    tokens: int
    seconds: float
    end: str
    closed: str = ""
    tries: int = 1


def record(case: Case, answered: Answered, found: Grade, prompt_tokens: int, tries: int) -> Record:
    return Record(case, answered.said, found, prompt_tokens, answered.tokens, round(answered.seconds, 3),
                  answered.end, answered.closed, tries)


class TraceFile:
    """Holds whole lines only, each on the disk before the next case begins."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError where there is a file: it may be the only record of a night."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            raise UsageError(f"--trace {path}: {fault.strerror}; give a path where nothing is") from fault

    def add(self, found: Record) -> None:
        """Raises Ds4Error on a full disk; the lines before stay."""
        data = json.dumps(asdict(found), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        before = os.lseek(self._file, 0, os.SEEK_END)
        try:
            if os.write(self._file, data) < len(data):
                raise OSError("the disk is full")
            os.fsync(self._file)
        except OSError as fault:
            os.ftruncate(self._file, before)
            raise Ds4Error(f"--trace {self.path}: {fault.strerror or fault}; the cases before {found.case.id} are "
                           "there, make room for more") from fault

    def close(self) -> None:
        os.close(self._file)


def read_trace(path: Path) -> list[Record]:
    """Raises UsageError naming the line at fault. A last line that was cut off is left out."""
    try:
        lines = path.read_text("utf-8", "surrogateescape").split("\n")
    except OSError as fault:
        raise UsageError(f"--regrade-trace {path}: {fault.strerror}; give a file of --trace") from fault
    return list(_records(lines, path))


def _records(lines: list[str], path: Path) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            case, said = dict(found.pop("case")), found.pop("said")
            for name in ("choices", "tools", "checks"):
                case[name] = tuple(case[name])
            whole = Case(**case)
            if fault := complaint(whole):
                raise ValueError(fault)
            calls = tuple((str(name), str(arguments)) for name, arguments in said["calls"])
            yield Record(**found | {"case": whole, "said": Said(said["text"], calls, said["whole"]),
                                    "grade": Grade(**found["grade"])})
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            if number == len(lines):
                return      # the process was killed in the middle of it
            raise UsageError(f"--regrade-trace {path}: line {number} is no record of --trace ({fault}); "
                             "correct or delete it") from fault
