"""Endless rows of token ids with loss weights, made of whole lessons: what training reads."""
from collections.abc import Callable, Iterator
from random import Random

import numpy as np

from ds4mlx.text.segments import ASSISTANT
from ds4mlx.text.tokenizer import Tokenizer
from ds4mlx.tiny.lessons.encoding import VOCABULARY, Encoder, exchangeable, vocabulary
from ds4mlx.tiny.lessons.episode import Episode
from ds4mlx.tiny.lessons.mixing import STAGES, episode
from ds4mlx.tiny.lessons.tasks import endless
from ds4mlx.tiny.lessons.words import Words

ANSWER = 100                  # loss weights, in percent: of an answer's tokens,
OTHER = {1: 4, 2: 0, 3: 0}    # and of what the model reads, by stage: names that nobody can foresee, 4 nats a token
WAITING = 16             # lessons that wait for a row with room for them
FILLING_TRIES = 2
SHORTEST = 24            # tokens; less room than that is padded
LONGEST_TRIES = 64

Row = tuple[np.ndarray, np.ndarray]


def rows(seed: int, length: int, stage: int, of_held: bool = False) -> Iterator[Row]:
    """Rows of `length` ids u16 and the loss weight u8, in percent, of each id as what is to be foreseen.

    Each lesson in a row begins with BOS, whose weight is 0; the end that no lesson fits is padded with EOS of weight 0.
    The same rows for the same seed, length and stage: give each worker a seed of its own. Stage 1 is for rows of 256
    and more, 2 of 512, 3 of 2048. Raises ValueError for another stage.
    """
    if stage not in STAGES:
        raise ValueError(f"stage is {stage}, need one of {STAGES}")
    rng = Random(f"{seed} {length} {stage} {of_held}")
    words = Words(rng, of_held, varied=True)
    source = _Source(rng, length, OTHER[stage], lambda room: episode(words, stage, room))
    while True:
        yield source.row()


def task_rows(seed: int, length: int) -> Iterator[Row]:
    """Rows of held-out tasks with the calls that answer them, which nothing learns from."""
    tasks = endless(seed)
    source = _Source(Random(seed), length, 0, lambda room: next(tasks).solved(), filling=False)
    while True:
        yield source.row()


def weights_of(ids: np.ndarray, tokenizer: Tokenizer, other: int) -> np.ndarray:
    """u8 [T]: ANSWER from behind an answer's header to its EOS, `other` elsewhere, 0 for BOS."""
    starts = np.zeros(len(ids) + 2, np.int32)
    starts[np.flatnonzero(ids == tokenizer.control[ASSISTANT]) + 2] = 1    # the header's two tokens are given
    ends = np.zeros(len(ids) + 2, np.int32)
    ends[np.flatnonzero(ids == tokenizer.eos) + 1] = 1
    inside = np.cumsum(starts - ends)[:len(ids)]
    weights = np.where(inside > 0, ANSWER, other).astype(np.uint8)
    weights[ids == tokenizer.bos] = 0
    return weights


class _Source:
    """Lessons as they come, and those that wait for room."""

    def __init__(self, rng: Random, length: int, other: int, make: Callable[[int], Episode],
                 filling: bool = True) -> None:
        """`make` gives a lesson, mostly of no more tokens than its argument, and if `filling` some for what room rows
        have left; `other` is the weight of what is read."""
        self.length, self.other, self._make, self._filling = length, other, make, filling
        self._encoder = Encoder(vocabulary())
        self._exchange = np.random.default_rng(rng.getrandbits(64))
        self._waiting: list[np.ndarray] = []

    def row(self) -> Row:
        tokenizer = self._encoder.tokenizer
        ids = np.full(self.length, tokenizer.eos, np.uint16)
        weights = np.zeros(self.length, np.uint8)
        filled = 0
        while (lesson := self._fitting(self.length - filled)) is not None:
            ids[filled:filled + len(lesson)] = lesson
            weights[filled:filled + len(lesson)] = weights_of(lesson, tokenizer, self.other)
            filled += len(lesson)
        return ids, weights

    def _encoded(self, made: Episode) -> np.ndarray:
        """u16 [T]. In a strange lesson pieces of names are exchanged, the same ones everywhere: what is copied stays a
        copy, and no piece tells which one follows, so that each is learned and none is guessed."""
        ids = np.array(self._encoder.encode(made.segments()), np.uint16)
        if not made.strange:
            return ids
        other = np.arange(VOCABULARY, dtype=np.uint16)
        for pieces in exchangeable():
            other[pieces] = self._exchange.permutation(pieces)
        return other[ids]

    def _fitting(self, room: int) -> np.ndarray | None:
        """The next lesson that has no more tokens than that; None where few are left.

        Lessons are made for whole rows, so that rows are of the kinds that are wanted, and not of those that fill them
        best: the one that waits longest begins a row, the largest that fits goes on.
        """
        if room < SHORTEST:
            return None
        self._wait()
        if room == self.length and self._waiting:
            return self._waiting.pop(0)
        fitting = [place for place, lesson in enumerate(self._waiting) if len(lesson) <= room]
        if fitting:
            return self._waiting.pop(max(fitting, key=lambda place: len(self._waiting[place])))
        for _ in range(FILLING_TRIES if self._filling else 0):
            lesson = self._encoded(self._make(room))
            if len(lesson) <= room:
                return lesson
        return None

    def _wait(self) -> None:
        for _ in range(LONGEST_TRIES):
            if len(self._waiting) == WAITING:
                return
            lesson = self._encoded(self._make(self.length))
            if len(lesson) <= self.length:
                self._waiting.append(lesson)
