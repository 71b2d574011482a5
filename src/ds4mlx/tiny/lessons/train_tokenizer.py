"""Train the vocabulary of the lessons: `python -m ds4mlx.tiny.lessons.train_tokenizer`. Rewrites tokenizer.json.

Byte-level BPE in the manner of the V4 tokenizer, made for copying. Words of the templates are one token, with and
without the space before them; names and values fall into common pieces of a few letters, learned or not, and digits
stand alone. No merge joins a space or a sign to a piece of a name, so a name has the same tokens wherever it stands.
"""
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ds4mlx.text.segments import CONTROL_LITERALS, Text
from ds4mlx.text.tokenizer import BYTE_OF, SPLITS
from ds4mlx.tiny.lessons.encoding import PIECES, VOCABULARY
from ds4mlx.tiny.lessons.mixing import STAGES, episode
from ds4mlx.tiny.lessons.words import FOLDERS, Words, listed

LESSONS = 3000        # of each stage, to count the templates' words in
INVENTED = 20_000     # words that nobody uses, to find the pieces of names
LISTED_WEIGHT = 30    # of a listed word beside an invented one
TEMPLATE_WORD = 40    # times a word has to occur to be one of the templates
SEED = 1
LISTS = ("nouns", "people", "places", "adjectives")
JOINED_TO_A_VALUE = re.compile(r">[^\n]|[^<]/|/.|.</")   # signs that would change a value's first or last token
HERE = Path(__file__).parent


def main() -> None:
    words, signs = _counted()
    names = _names()
    values = {word for name in LISTS for half in (False, True) for word in listed(name, half)} | set(FOLDERS)
    template = sorted(word for word, count in words.items() if count >= TEMPLATE_WORD
                      and len(word) > 1 and word not in values)
    base = VOCABULARY - len(CONTROL_LITERALS)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.train_from_iterator(_corpus(template, signs, names), BpeTrainer(
        vocab_size=base - len(template), initial_alphabet=sorted(BYTE_OF), show_progress=False))
    learned = json.loads(tokenizer.to_str())["model"]
    vocabulary, merges = learned["vocab"], [list(merge) for merge in learned["merges"]]
    for word in template:
        assert word in vocabulary, word
        vocabulary["Ġ" + word] = len(vocabulary)
        merges.append(["Ġ", word])
    path = HERE / "tokenizer.json"
    path.write_text(json.dumps(_file(vocabulary, merges), ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
    print(f"{path}: {len(vocabulary)} tokens and {len(CONTROL_LITERALS)} control tokens; "
          f"{len(template)} template words")


def _counted() -> tuple[Counter[str], Counter[str]]:
    """How often each word, and each run of signs or spaces, occurs in lessons."""
    words: Counter[str] = Counter()
    signs: Counter[str] = Counter()
    for stage in STAGES:
        source = Words(Random(f"{SEED} {stage}"))
        for _ in range(LESSONS if stage < 3 else LESSONS // 10):
            for segment in episode(source, stage, 1024 if stage < 3 else 4096).segments():
                if isinstance(segment, Text):
                    _count(segment.text, words, signs)
    return words, signs


def _count(text: str, words: Counter[str], signs: Counter[str]) -> None:
    for piece in PIECES.findall(text):
        if piece[-1].isalpha():
            words[piece if piece[0].isalpha() else piece[1:]] += 1
        elif not piece[0].isdigit() and not JOINED_TO_A_VALUE.search(piece):
            signs[piece] += 1


def _names() -> Counter[str]:
    """Words of both halves that stand for names and values, listed ones more often than invented ones."""
    rng = Random(SEED)
    names = Counter(source.invented() for source in (Words(rng), Words(rng, True)) for _ in range(INVENTED // 2))
    names += Counter({word: LISTED_WEIGHT for name in LISTS for half in (False, True) for word in listed(name, half)})
    return names + Counter({word.capitalize(): count for word, count in names.items() if word.islower()})


def _corpus(template: list[str], signs: Counter[str], names: Counter[str]) -> Iterator[str]:
    """Template words so often that each becomes one token; names so that their common pieces do."""
    for word in template:
        yield from [word] * 3000
    for sign, count in sorted(signs.items()):
        yield from [sign] * min(count, 3000)
    for word, count in sorted(names.items()):
        yield from [word] * count


def _file(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, object]:
    """tokenizer.json, with the splits of V4 and the control tokens last."""
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
              for pattern in SPLITS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [{"id": len(vocabulary) + i, "content": literal, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": False} for i, literal in enumerate(CONTROL_LITERALS)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]}, "post_processor": None,
            "decoder": None, "model": {"type": "BPE", "dropout": None, "unk_token": None,
                                       "continuing_subword_prefix": None, "end_of_word_suffix": None,
                                       "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                                       "merges": merges}}


if __name__ == "__main__":
    main()
