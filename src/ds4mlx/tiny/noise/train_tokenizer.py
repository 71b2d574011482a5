"""Train the noise's vocabulary: `python -m ds4mlx.tiny.noise.train_tokenizer`, in a checkout. Rewrites tokenizer.json.

Byte-level BPE in the manner of the V4 tokenizer, on text that was all written for this project: its sources, its
documents, and the paragraphs beside this file. The result depends on that text, so it is made once and committed.
"""
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, SPLITS

VOCABULARY = 4096
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[3]
PROSE_WEIGHT = 8  # copies of the paragraphs: answers in words rather than in Python


def main() -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated") for pattern in SPLITS]
                                       + [ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(vocab_size=VOCABULARY - len(CONTROL_LITERALS), initial_alphabet=sorted(BYTE_OF),
                         show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    data = json.loads(tokenizer.to_str())
    base = len(data["model"]["vocab"])
    if base != VOCABULARY - len(CONTROL_LITERALS):
        raise SystemExit(f"the text gives only {base} tokens; a vocabulary of {VOCABULARY} needs more of it")
    data["added_tokens"] = [
        {"id": base + i, "content": literal, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False} for i, literal in enumerate(CONTROL_LITERALS)]
    path = HERE / "tokenizer.json"
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
    print(f"{path}: {base} tokens and {len(CONTROL_LITERALS)} control tokens, {path.stat().st_size} bytes")


def _texts() -> Iterator[str]:
    for pattern in ("*.md", "src/**/*.py"):
        for path in sorted(REPOSITORY.glob(pattern)):
            yield path.read_text("utf-8")
    for _ in range(PROSE_WEIGHT):
        yield (HERE / "paragraphs.txt").read_text("utf-8")


if __name__ == "__main__":
    main()
