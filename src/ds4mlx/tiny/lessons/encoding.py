"""Segments -> ids as the tokenizer gives them, several times as fast: lessons repeat their words.

The tokenizer's pieces are found by a regular expression for ASCII, and each piece is encoded once. Other text goes to
the tokenizer itself.
"""
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from itertools import groupby

import numpy as np

from ds4mlx.chat.dialects.deepseek_v4_templates import tools_block
from ds4mlx.text.segments import Control, Segment, Text
from ds4mlx.text.tokenizer import Tokenizer

VOCABULARY = 3072       # ids, those of control tokens last
PIECES = re.compile(
    r"\d{1,3}|[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n!-~]?[A-Za-z]+| ?[!-/:-@\[-`{-~]+[\r\n]*|\s*[\r\n]+|\s+(?![^\s\d])|\s+|.",
    re.ASCII | re.DOTALL)
REMEMBERED = 200_000   # pieces; the names of lessons never end


@cache
def vocabulary() -> Tokenizer:
    """The tokenizer of the lessons and of the model that learns them."""
    return Tokenizer.from_json(json.loads((resources.files("ds4mlx.tiny.lessons") / "tokenizer.json").read_bytes()))


@cache
def exchangeable() -> tuple[np.ndarray, ...]:
    """Ids of the pieces that names are made of, in small letters and with a capital: any may stand for any other.

    Words of the templates are none, nor what the instructions around schemas have.
    """
    tokenizer = vocabulary()
    texts = {i: tokenizer.decode([i]) for i in tokenizer.text_ids}
    spaced = {text[1:] for text in texts.values() if text[:1] == " "}
    fixed = set(tokenizer.encode(tools_block([])))
    pieces = {i: text for i, text in texts.items() if len(text) > 1 and text.isascii() and text.isalpha()
              and text not in spaced and i not in fixed}
    return tuple(np.array(sorted(i for i, text in pieces.items() if test(text)), np.uint16)
                 for test in (str.islower, str.istitle))


class Encoder:
    """Equal to `Tokenizer.encode` for what lessons are made of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of controls and texts; adjacent texts are one run."""
        ids: list[int] = []
        for _, group in groupby(segments, type):
            same = list(group)
            ids += [self.tokenizer.control[each.literal] for each in same if isinstance(each, Control)]
            ids += self.run("".join([each.text for each in same if isinstance(each, Text)]))
        return ids

    def run(self, text: str) -> list[int]:
        """Ids of one run of text."""
        if not text.isascii():
            return self.tokenizer.encode_literal(text)
        pieces, ids = self._pieces, []
        for piece in PIECES.findall(text):
            known = pieces.get(piece)
            if known is None:
                known = self._piece(piece)
            ids += known
        return ids

    def _piece(self, piece: str) -> list[int]:
        if len(self._pieces) >= REMEMBERED:
            self._pieces.clear()
        self._pieces[piece] = ids = self.tokenizer.encode_literal(piece)
        return ids
