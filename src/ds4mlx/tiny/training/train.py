"""The loop: `python -m ds4mlx.tiny.training.train --plan 1:1024 --seconds 200 --out DIRECTORY/run`.

A plan is phases `stage:length@seconds`, one after the other, the last without seconds; phases joined by + take turns
step by step. All batches have the same number of tokens. Time is the wall clock's, compilation included, so that a
run ends when it has to; the order of lessons depends on the seed alone.
"""
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ds4mlx.quant import importance
from ds4mlx.tiny import lessons
from ds4mlx.tiny.lessons.packing import ANSWER
from ds4mlx.tiny.training import checkpoint
from ds4mlx.tiny.training.attention import Mode
from ds4mlx.tiny.training.feed import Batch, Feed
from ds4mlx.tiny.training.few_bits import imatrix, round_experts
from ds4mlx.tiny.training.model import Model
from ds4mlx.tiny.training.optimizer import Optimizer
from ds4mlx.tiny.training.shape import RATIOS, shape

WARM_UP_STEPS = 40
TASK_BATCHES = 8
INDEX_WEIGHT = 0.5          # of the indexers' loss
BALANCE_RATE = 1e-3         # of the routers' biases, a step
FEW_BITS_STEPS = 8          # between two roundings of the experts, which so cost a fifth of an H200's speed
TEACHING_STEPS = 4          # from one in which the indexers learn to the next; once they can, more often is not needed


@dataclass(frozen=True, slots=True)
class Phase:
    """Kinds of batches (stage, length) that take turns for so many seconds of the clock."""
    kinds: tuple[tuple[int, int], ...]
    seconds: float


def phases(plan: str) -> Iterator[Phase]:
    """`1:1024@60,2:1024+3:8192` to phases."""
    for part in plan.split(","):
        kinds, _, seconds = part.partition("@")
        yield Phase(tuple(tuple(map(int, kind.split(":"))) for kind in kinds.split("+")),
                    float(seconds) if seconds else float("inf"))


@dataclass(slots=True)
class Progress:
    """What happened since the last line."""
    began: float
    steps: int = 0
    tokens: int = 0
    since: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)

    def line(self, total: int, now: float, last: str) -> str:
        rate = self.tokens / (now - self.since)
        loss, index = (torch.stack(a).mean().item() if a else 0.0 for a in (self.losses, self.index_losses))
        return (f"{now - self.began:6.1f} s step {total} loss {loss:.4f} index {index:.3f} {rate / 1000:.0f}k tokens/s "
                f"{last}")


def graded(correct: np.ndarray, weights: np.ndarray) -> tuple[float, float, int]:
    """Share of right tokens, share of answers right in every token, and number of answers. `weights` [B, T] are those
    of the targets; an answer is a run of targets of weight ANSWER."""
    asked = weights == ANSWER
    starts = asked & ~np.pad(asked, ((0, 0), (1, 0)))[:, :-1]
    answer = (np.cumsum(starts.reshape(-1)) - 1)[asked.reshape(-1)]
    right = correct.reshape(-1)[asked.reshape(-1)]
    if not right.size:
        return 0.0, 0.0, 0
    wrong = np.bincount(answer, weights=~right)
    return float(right.mean()), float((wrong == 0).mean()), len(wrong)


def weighed_loss(model: Model, hidden: Tensor, targets: Tensor, weights: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
    """Cross entropy by the weights of the targets [B, T], and where the likeliest token is right."""
    logits = model.logits(hidden, mode)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    w = weights.flatten()
    return (loss * w).sum() / w.sum().clamp(min=1), logits.argmax(-1) == targets


class Trainer:
    """A model on its device with all that steps need."""

    def __init__(self, args: Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.model = Model(shape(lessons.VOCABULARY, args.ratios))
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if args.resume:
            self._resume(args.resume, args.layers)
        self.model.to(self.device)
        self.indexers = [layer.attn.indexer for layer in self.model.layers if layer.attn.ratio == 4]
        self.always_teaching = self.teaching = not args.resume
        self.mode = Mode(torch.bfloat16, rounding=True, choosing=not args.dense)
        self.optimizer = Optimizer(self.model, args.matrix_rate, args.rate)
        self.loss = weighed_loss
        if args.compile:
            torch._dynamo.config.recompile_limit = 64   # two lengths, three kinds of layers, all of one class
            for layer in self.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(weighed_loss, dynamic=False, fullgraph=True)
        self.few_bits, self.read_weight = False, args.read_weight

    def _resume(self, files: list[Path], layers: list[int] | None) -> None:
        weights, about = checkpoint.load(files)
        if layers:
            weights = checkpoint.with_layers(weights, layers)
        self.model.load_state_dict({path: torch.from_numpy(array) for path, array in weights.items()})
        self.step, self.tokens, self.seconds = (about[key] for key in ("steps", "tokens", "seconds"))

    def train(self, batch: Batch, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """One step. Returns the loss, the indexers' loss, and which targets were right."""
        if self.few_bits and self.step % FEW_BITS_STEPS == 0:
            round_experts(self.model)
        self.teaching = self.always_teaching or self.step % TEACHING_STEPS == 0
        for indexer in self.indexers:
            indexer.teaching = self.teaching
        ids, targets, weights = self.on_device(batch)
        hidden, index_loss, loads = self.model(ids, self.mode)
        loss, correct = self.loss(self.model, hidden, targets, weights, self.mode)
        (loss + INDEX_WEIGHT * index_loss).backward()
        self.optimizer.step(factor)
        with torch.no_grad():
            for layer, load in zip(self.model.layers, loads, strict=True):
                layer.ffn.seen.add(load)
                if not layer.ffn.hashed:
                    layer.ffn.gate_bias += BALANCE_RATE * torch.sign(load.share.mean() - load.share)
        self.step, self.tokens = self.step + 1, self.tokens + ids.numel()
        return loss.detach(), index_loss.detach(), correct

    def on_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """ids, and for each the id that follows and its weight; nothing follows the last. What is only read weighs less
        by `read_weight`."""
        ids, weights = (torch.from_numpy(a.astype(np.int64)).to(self.device, non_blocking=True) for a in batch)
        weights = F.pad(weights[:, 1:], (0, 1)).float()
        return ids, F.pad(ids[:, 1:], (0, 1)), torch.where(weights == ANSWER, weights, self.read_weight * weights)

    def grade(self, batch: Batch) -> tuple[float, float, int]:
        """Shares as of `graded`. With gradients, though none are wanted: without, all would be compiled again."""
        ids, targets, weights = self.on_device(batch)
        hidden, _, _ = self.model(ids, self.mode)
        _, correct = self.loss(self.model, hidden, targets, weights, self.mode)
        return graded(correct.cpu().numpy(), weights.cpu().numpy())

    def save(self, stem: Path, elapsed: float) -> None:
        weights = {path: value.detach().float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
                   for path, value in self.model.state_dict().items()}
        about = {"steps": self.step, "tokens": self.tokens, "seconds": self.seconds + elapsed,
                 "vocabulary": lessons.VOCABULARY, "ratios": list(self.model.config.compress_ratios)}
        files = checkpoint.save(stem, weights, about)
        importance.write(imatrix(self.model, stem.with_name(f"{stem.name}.dat"), self.step))
        print(f"saved {', '.join(f'{file.name} {file.stat().st_size / 2**20:.1f} MiB' for file in files)}", flush=True)


def run(args: Namespace) -> None:
    began = time.monotonic()
    plan = list(phases(args.plan))
    kinds = dict.fromkeys(kind for phase in plan for kind in phase.kinds)
    first = args.seed * 100 + args.run
    feeds = {(stage, length): Feed(lessons.rows, first, length, stage, args.batch_tokens // length, args.workers)
             for stage, length in kinds}
    exams = {(stage, length): Feed(partial(lessons.rows, of_held=True), 7_000_000 + first, length, stage,
                                   args.batch_tokens // length, 1) for stage, length in kinds}
    tasks = Feed(lambda seed, length, stage: lessons.task_rows(seed, length), 7_000_000 + first, plan[0].kinds[0][1], 0,
                 args.batch_tokens // plan[0].kinds[0][1], 1)
    trainer = Trainer(args)
    print(f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters on {trainer.device}, "
          f"step {trainer.step}, {time.monotonic() - began:.1f} s to start", flush=True)
    try:
        loop(args, trainer, plan, feeds, began)
        for kind, exam in exams.items():
            tokens, answers, count = trainer.grade(exam.batch())
            print(f"held out {kind}: tokens {tokens:.4f}, whole answers {answers:.4f} of {count}", flush=True)
        print(f"calls of tasks: {solved(trainer, tasks):.4f} right", flush=True)
    finally:
        trainer.save(args.out, time.monotonic() - began)
        for feed in [*feeds.values(), *exams.values(), tasks]:
            feed.close()


def solved(trainer: Trainer, tasks: Feed) -> float:
    """Share of tasks whose calls are right in every token, of some 300."""
    marks = [trainer.grade(tasks.batch()) for _ in range(TASK_BATCHES)]
    return sum(answers * count for _, answers, count in marks) / max(sum(count for _, _, count in marks), 1)


def loop(args: Namespace, trainer: Trainer, plan: list[Phase], feeds: dict[tuple[int, int], Feed],
         began: float) -> None:
    """Until `args.seconds` after `began`."""
    at, first_step = 0, trainer.step
    phase_end, saved = began + plan[0].seconds, time.monotonic()
    progress = Progress(began, since=time.monotonic())
    while (now := time.monotonic()) - began < args.seconds:
        if now > phase_end and at + 1 < len(plan):
            at += 1
            phase_end = now + plan[at].seconds
        if not trainer.few_bits and now - began > args.few_bits_from:
            trainer.few_bits = True
            print("experts in few bits from here on", flush=True)
        kind = plan[at].kinds[trainer.step % len(plan[at].kinds)]
        batch = feeds[kind].batch()
        factor = min(1.0, (trainer.step - first_step + 1) / WARM_UP_STEPS) * falling(args, now - began)
        loss, index_loss, correct = trainer.train(batch, factor)
        progress.steps, progress.tokens = progress.steps + 1, progress.tokens + batch[0].size
        progress.losses.append(loss)
        if trainer.teaching:
            progress.index_losses.append(index_loss)
        if now - progress.since > args.every:
            torch.cuda.synchronize() if trainer.device.type == "cuda" else None
            right = graded(correct.cpu().numpy(), np.pad(batch[1][:, 1:], ((0, 0), (0, 1))))
            told = f"{kind} tokens {right[0]:.3f} answers {right[1]:.3f} of {right[2]}, factor {factor:.3f}"
            now = time.monotonic()
            print(progress.line(trainer.step, now, told), flush=True)
            progress = Progress(began, since=now)
        if now - saved > args.save_every:
            trainer.save(args.out, now - began)
            saved = time.monotonic()


def falling(args: Namespace, elapsed: float) -> float:
    """1 until `fall_from` seconds, then linearly to `fall_to` at the end."""
    left = (args.seconds - elapsed) / max(args.seconds - args.fall_from, 1e-9)
    return args.start * min(1.0, args.fall_to + (1 - args.fall_to) * max(left, 0.0))


def main() -> None:
    parser = ArgumentParser(prog="python -m ds4mlx.tiny.training.train", description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="1:1024@120,2:1024@300,2:1024+3:8192", help="phases stage:length@seconds")
    parser.add_argument("--seconds", type=float, default=600, help="of the wall clock, from the start")
    parser.add_argument("--out", type=Path, required=True, help="stem of the checkpoint's files")
    parser.add_argument("--resume", type=Path, nargs="+", help="files of a checkpoint")
    parser.add_argument("--layers", type=int, nargs="+", help="of the checkpoint to keep, in this order; or all")
    parser.add_argument("--ratios", type=int, nargs="+", default=RATIOS, help="of each layer: 0, 4 or 128")
    parser.add_argument("--seed", type=int, default=20, help="of weights and lessons")
    parser.add_argument("--run", type=int, default=0, help="other lessons for each run that resumes")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=20, help="processes for each kind of batch")
    parser.add_argument("--matrix-rate", type=float, default=0.015, help="of Muon")
    parser.add_argument("--rate", type=float, default=0.003, help="of AdamW")
    parser.add_argument("--start", type=float, default=1.0, help="factor of the rates at the start")
    parser.add_argument("--fall-from", type=float, default=1e9, help="seconds from which the rates fall")
    parser.add_argument("--fall-to", type=float, default=0.02)
    parser.add_argument("--few-bits-from", type=float, default=1e9, help="seconds from which experts are rounded")
    parser.add_argument("--read-weight", type=float, default=1.0, help="of the lessons' weight of what is only read")
    parser.add_argument("--dense", action="store_true", help="attend to all compressed rows, chosen or not")
    parser.add_argument("--every", type=float, default=5, help="seconds between lines")
    parser.add_argument("--save-every", type=float, default=100)
    parser.add_argument("--compile", action="store_true")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
