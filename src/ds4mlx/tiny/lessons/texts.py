"""Lessons as text: `python -m ds4mlx.tiny.lessons.texts --count 200 > lessons.jsonl`, a rendered conversation a line.

What `ds4mlx quantize imatrix --dataset` takes, and what shows a reader what the model learns from.
"""
import argparse
import json
from collections.abc import Iterator
from random import Random

from ds4mlx.text.segments import rendered_text
from ds4mlx.tiny.lessons.mixing import STAGES, episode
from ds4mlx.tiny.lessons.words import Words


def texts(seed: int, count: int, stage: int, room: int, of_held: bool = False) -> Iterator[str]:
    """That many lessons, control tokens by their literals; most have fewer than `room` tokens."""
    words = Words(Random(f"{seed} texts"), of_held, varied=True)
    for _ in range(count):
        yield rendered_text(episode(words, stage, room).segments())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seed", 0), ("count", 200), ("room", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stage", type=int, choices=STAGES, default=2)
    parser.add_argument("--held-out", action="store_true", help="of words that the model does not learn")
    options = parser.parse_args()
    for text in texts(options.seed, options.count, options.stage, options.room, options.held_out):
        print(json.dumps({"prompt": text}, ensure_ascii=False))


if __name__ == "__main__":
    main()
