"""What files would answer from the right beginnings: `python -m ds4mlx.tiny.training.marks FILE.gguf...`.

Where every token of a right answer is the likeliest one behind those before it, the model gives that answer at
temperature 0. This takes one pass over a row of many answers, in seconds on a GPU; `tests/bench/tiny_scores.py` asks
a server, token by token.

Files of one model differ by less than rows do, so all files read the same rows and are compared row by row.
"""
import math
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Of one file, for the answers in some rows; arrays are f64 [rows]."""
    answers: np.ndarray     # how many there are in a row,
    right: np.ndarray       # and how many of them are right in every token
    tokens: np.ndarray      # of answers
    nats: np.ndarray        # of these tokens, summed: minus the logarithms of their probabilities
    apart: np.ndarray       # Kullback-Leibler divergence from the first file there, summed

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats.sum() / max(self.tokens.sum(), 1))

    def over(self, other: "Marks") -> tuple[float, float]:
        """How many nats a token more than the other file, and the standard error of that, by rows."""
        more, tokens = self.nats - other.nats, max(self.tokens.sum(), 1)
        mean = more.sum() / tokens
        spread = np.square(more - mean * self.tokens).sum() * len(more) / max(len(more) - 1, 1)
        return mean, math.sqrt(spread) / tokens

    def __str__(self) -> str:
        answers, tokens = self.answers.sum(), max(self.tokens.sum(), 1)
        return (f"{100 * self.right.sum() / max(answers, 1):.1f} % of {answers:.0f}, perplexity {self.perplexity:.6f} "
                f"of {tokens:.0f} tokens, {1e3 * self.apart.sum() / tokens:.4f} millinats from the first")

    def __add__(self, other: "Marks") -> "Marks":
        """Of the rows of both."""
        return Marks(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__slots__))


def load(path: Path, device: torch.device) -> Model:
    """The training graph with the weights of a GGUF file, as they are in it. Raises ModelFileError."""
    with GGUF.open(path) as file:
        model = Model(config := validate(file))
        state = {need.path: torch.tensor(dequantize(file.raw(name), file.tensors[name].kind)).reshape(need.shape)
                 for name, need in expected_tensors(config).items()}
        model.load_state_dict(state)
    return model.to(device)


@torch.no_grad()
def marks(models: Sequence[Model], rows: Iterator[Row], count: int, mode: Mode = EXACT,
          temperature: float = 1.0) -> list[Marks]:
    """Of each model for the answers in `count` rows, whose lengths are whole windows. Probabilities are those at
    `temperature`."""
    of_rows = [_of_row(models, row, mode, temperature) for row in islice(rows, count)]
    return [Marks(*np.array(of_model, np.float64).T) for of_model in zip(*of_rows, strict=True)]


def _of_row(models: Sequence[Model], row: Row, mode: Mode, temperature: float) -> list[tuple[float, ...]]:
    """Of each model the fields of `Marks`."""
    told, first = [], None
    asked = np.flatnonzero(row[1][1:] == ANSWER)
    ids = torch.from_numpy(row[0].astype(np.int64)).to(models[0].embed.device)
    for model in models:
        logp = _foreseen(model, ids, torch.from_numpy(asked).to(ids.device), mode, temperature)
        first = logp if first is None else first
        nats = F.nll_loss(logp, ids[1:][asked], reduction="sum")
        right = np.zeros((1, len(row[0]) - 1), bool)
        right[0, asked] = (logp.argmax(-1) == ids[1:][asked]).cpu().numpy()
        _, share, answers = graded(right, row[1][None, 1:])
        apart = F.kl_div(logp, first, reduction="sum", log_target=True)
        told.append((answers, share * answers, len(asked), nats.item(), apart.item()))
    return told


def _foreseen(model: Model, ids: Tensor, asked: Tensor, mode: Mode, temperature: float) -> Tensor:
    """f64 [N, V]: logarithms of the probabilities behind the N tokens `asked` of ids [T]."""
    hidden = model(ids[None], mode)[0][0, asked]
    return torch.log_softmax(model.logits(hidden, mode).double() / temperature, dim=-1)


def main() -> None:
    parser = ArgumentParser(prog="python -m ds4mlx.tiny.training.marks", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files of the tiny model's shape")
    for name, default, told in (("tasks", 150, "held-out tasks, two or so to a row"), ("rows", 24, "tool lessons"),
                                ("far", 8, f"lessons of {FAR_LENGTH} tokens")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"rows of {told}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0, help="that divides logits: above 1, "
                        "a model that is too sure of what is wrong has less perplexity")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {"calls of tasks": (args.tasks, lambda: lessons.task_rows(args.seed, LENGTH)),
             "held-out lessons": (args.rows, lambda: lessons.rows(args.seed, LENGTH, 2, of_held=True)),
             "held-out long lessons": (args.far, lambda: lessons.rows(args.seed, FAR_LENGTH, 3, of_held=True))}
    models = [load(file, device) for file in args.files]
    answers: list[list[Marks]] = []
    for kind, (count, rows) in kinds.items():
        if count:
            answers.append(marks(models, rows(), count, EXACT, args.temperature))
            tell(kind, args.files, answers[-1])
    if len(answers) > 1:
        tell("all of these", args.files, [sum(of_file[1:], of_file[0]) for of_file in zip(*answers, strict=True)])


def tell(kind: str, files: Sequence[Path], of_files: Sequence[Marks]) -> None:
    """Print each file's marks, and what it is above those before it."""
    for i, (file, its) in enumerate(zip(files, of_files, strict=True)):
        print(f"{file.stem}: {kind}: {its}")
        for before, others in zip(files[:i], of_files[:i], strict=True):
            print("    {:+.4f} ± {:.4f} millinats a token above {}".format(*(1e3 * v for v in its.over(others)),
                                                                          before.stem), flush=True)


if __name__ == "__main__":
    main()
