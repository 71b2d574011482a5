"""Stop strings over text that comes in pieces: the earliest match wins, then the longest."""
from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string appears in it, and holds back only what may be part of one.

    Each string is followed by its Knuth-Morris-Pratt automaton, so that time is linear in the text whatever repeats.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in dict.fromkeys(strings) if string]
        self._borders = [_borders(string) for string in self._strings]
        self._progress = [0] * len(self._strings)  # characters of each string that the text so far ends with
        self._held = ""
        self._best: tuple[int, int] | None = None  # (start, index) of the match to beat; start is relative to _held
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may be shown. Once `matched` is set, nothing else may."""
        if not self._strings or self.matched is not None:
            return text if self.matched is None else ""
        data, begin = self._held + text, len(self._held)
        for end in range(begin + 1, len(data) + 1):
            self._advance(data[end - 1], end)
            if self._best is not None and self._earliest_partial(end) > self._best[0]:
                return self._stop(data)
        keep = self._earliest_partial(len(data))
        keep = keep if self._best is None else min(keep, self._best[0])
        self._held = data[keep:]
        self._best = self._best and (self._best[0] - keep, self._best[1])
        return data[:keep]

    def flush(self) -> str:
        """The text ends here: what was held, or `matched` is set."""
        if self._best is not None:
            return self._stop(self._held)
        held, self._held = self._held, ""
        self._progress = [0] * len(self._strings)
        return held

    def _advance(self, character: str, end: int) -> None:
        for index, string in enumerate(self._strings):
            length, borders = self._progress[index], self._borders[index]
            while length and string[length] != character:
                length = borders[length - 1]
            length += string[length] == character
            if length == len(string):
                start = end - length
                if self._best is None or (start, -length) < (self._best[0], -len(self._strings[self._best[1]])):
                    self._best = (start, index)
                length = borders[length - 1]
            self._progress[index] = length

    def _earliest_partial(self, end: int) -> int:
        """Where the earliest string begins that is not complete yet; `end` when there is none."""
        return end - max(self._progress)

    def _stop(self, data: str) -> str:
        assert self._best is not None
        start, index = self._best
        self.matched, self._held, self._best = self._strings[index], "", None
        return data[:start]


def _borders(string: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it ends with."""
    borders, length = [0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length - 1]
        length += string[length] == character
        borders.append(length)
    return borders
