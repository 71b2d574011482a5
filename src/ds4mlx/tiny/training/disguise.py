"""Names in other pieces: a lesson whose pieces of words are exchanged for any others stays right, for it is copied.

Lessons know but a part of the words there are, and of the pieces that words are made of. A piece that no lesson has
would never be written, and one that always follows another would be guessed. So in a share of the lessons the pieces
of what the model reads become others at random, in its answers too. What only an answer has is no copy and stays.
"""
from functools import cache

import numpy as np

from ds4mlx.tiny import lessons

SHARE = 0.4     # of the lessons
ANSWER = 100    # loss weight of what the model is to write


@cache
def pieces() -> np.ndarray:
    """Ids of parts of words, u16: letters alone, two or more, which no template has as a word."""
    vocabulary = lessons.vocabulary()
    spelled = {vocabulary.token_bytes(i): i for i in range(vocabulary.vocab_size) if i not in vocabulary.control_ids}
    return np.array([i for text, i in spelled.items()
                     if len(text) > 1 and text.isalpha() and b" " + text not in spelled], np.uint16)


def disguise(ids: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> None:
    """Exchange pieces in place, in a row ids u16 [T] of lessons, each of which begins with BOS; weights u8 [T]."""
    starts = np.flatnonzero(ids == lessons.vocabulary().bos)
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        if rng.random() < SHARE:
            lesson = ids[start:end]
            read = np.intersect1d(lesson[weights[start:end] < ANSWER], pieces())
            table = np.arange(lessons.VOCABULARY, dtype=np.uint16)
            table[read] = rng.choice(pieces(), len(read), replace=False)
            lesson[:] = table[lesson]
