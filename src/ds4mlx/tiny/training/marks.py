"""What a file would answer from the right beginnings: `python -m ds4mlx.tiny.training.marks FILE.gguf...`.

Where every token of a right answer is the likeliest one behind those before it, the model gives that answer at
temperature 0. This takes one pass over a row of many answers, in seconds on a GPU; `tests/bench/tiny_scores.py` asks
a server, token by token.
"""
import math
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ds4mlx.gguf.dequant import dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.names import expected_tensors, validate
from ds4mlx.tiny import lessons
from ds4mlx.tiny.lessons.packing import ANSWER, Row
from ds4mlx.tiny.training.attention import Mode
from ds4mlx.tiny.training.model import Model
from ds4mlx.tiny.training.train import graded

EXACT = Mode(torch.float32)     # as the engine computes
LENGTH, FAR_LENGTH = 2048, 8192


@dataclass(frozen=True, slots=True)
class Marks:
    """Of the answers in some rows."""
    answers: int
    right: float            # share of them that are right in every token
    perplexity: float       # of their tokens

    def __str__(self) -> str:
        return f"{100 * self.right:.1f} % of {self.answers}, perplexity {self.perplexity:.4f}"


def load(path: Path, device: torch.device) -> Model:
    """The training graph with the weights of a GGUF file, as they are in it. Raises ModelFileError."""
    with GGUF.open(path) as file:
        model = Model(config := validate(file))
        state = {need.path: torch.tensor(dequantize(file.raw(name), file.tensors[name].kind)).reshape(need.shape)
                 for name, need in expected_tensors(config).items()}
        model.load_state_dict(state)
    return model.to(device)


@torch.no_grad()
def marks(model: Model, rows: Iterator[Row], count: int, mode: Mode = EXACT) -> Marks:
    """Of the answers in `count` rows, whose lengths are whole windows."""
    device, total, tokens, whole, answers = model.embed.device, 0.0, 0, 0.0, 0
    for ids, weights in islice(rows, count):
        row = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
        logits = model.logits(model(row, mode)[0], mode)[0, :-1]
        asked = weights[None, 1:] == ANSWER
        nll = F.cross_entropy(logits, row[0, 1:], reduction="none").cpu().numpy()
        total, tokens = total + float(nll[asked[0]].sum()), tokens + int(asked.sum())
        _, share, some = graded((logits.argmax(-1) == row[0, 1:]).cpu().numpy()[None], weights[None, 1:])
        whole, answers = whole + share * some, answers + some
    return Marks(answers, whole / max(answers, 1), math.exp(total / max(tokens, 1)))


def main() -> None:
    parser = ArgumentParser(prog="python -m ds4mlx.tiny.training.marks", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files of the tiny model's shape")
    for name, default, told in (("tasks", 150, "held-out tasks, two or so to a row"), ("rows", 24, "tool lessons"),
                                ("far", 8, f"lessons of {FAR_LENGTH} tokens")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"rows of {told}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {"calls of tasks": (args.tasks, lambda: lessons.task_rows(args.seed, LENGTH)),
             "held-out lessons": (args.rows, lambda: lessons.rows(args.seed, LENGTH, 2, of_held=True)),
             "held-out long lessons": (args.far, lambda: lessons.rows(args.seed, FAR_LENGTH, 3, of_held=True))}
    for file in args.files:
        model = load(file, device)
        for kind, (count, rows) in kinds.items():
            if count:
                print(f"{file.name}: {kind}: {marks(model, rows(), count)}", flush=True)


if __name__ == "__main__":
    main()
