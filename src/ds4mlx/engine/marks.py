"""Which places to rewind to a session keeps, whatever the engine."""
from collections.abc import Sequence


def least_useful(marks: Sequence[int], length: int) -> int:
    """Index of the mark, of ascending lengths in tokens, whose loss leaves the smallest gap for its age in a session of
    `length` tokens: distances double going back. The first and the last two stay, as far as there may be so many."""
    return min(range(1, len(marks) - 2), default=0,
               key=lambda i: (marks[i + 1] - marks[i - 1]) / (length + 1 - marks[i]))
