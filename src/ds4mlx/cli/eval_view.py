"""What is shown of an evaluation as it goes. Without a terminal: a line a case."""
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from ds4mlx.evaluation.asking import Progress
from ds4mlx.evaluation.cases import Case
from ds4mlx.evaluation.trace import Record
from ds4mlx.text.escaping import harmless


class View(Protocol):
    """Cases go by their place in the list. To be entered."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None,
                 trace: TracebackType | None) -> None: ...
    def next(self) -> int | None: ...       # the case to ask now; None: enough
    def begin(self, index: int, prompt_tokens: int) -> None: ...
    def progress(self, index: int, progress: Progress) -> bool: ...     # whether to go on
    def again(self, index: int) -> None: ...
    def end(self, index: int, found: Record) -> None: ...
    def stopped(self, index: int) -> None: ...


class LineView:
    """Standard output gets a line when a case is graded."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases, self._next = cases, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None,
                 trace: TracebackType | None) -> None:
        pass

    def next(self) -> int | None:
        return self._next if self._next < len(self._cases) else None

    def begin(self, index: int, prompt_tokens: int) -> None:
        self._next = index + 1

    def progress(self, index: int, progress: Progress) -> bool:
        return True

    def again(self, index: int) -> None:
        print(f"{self._cases[index].id}: no answer, asked again with twice the tokens", file=sys.stderr)

    def end(self, index: int, found: Record) -> None:
        told = f"{found.case.id} {found.grade.verdict} given={found.grade.given} expected={found.grade.expected}"
        print(f"{index + 1}/{len(self._cases)} {harmless(told)} prompt={found.prompt_tokens} "
              f"generated={found.tokens} seconds={found.seconds:.1f}", flush=True)

    def stopped(self, index: int) -> None:
        print(f"ds4mlx eval: stopped at {self._cases[index].id}", file=sys.stderr)
