"""Logits to compare with: files of ds4's format, and what must agree.

Official vectors are what the hosted model said, as bytes of tokens and log-probabilities of the likeliest:
    case ID CONTEXT STEPS PROMPT-FILE / step I SELECTED-HEX COUNT / top HEX LOGPROB / end
A golden snapshot is what these very weights said once, as logits of the likeliest ids after so many prompt tokens:
    case ID text|chat CONTEXT FRONTIER PROMPT-FILE COUNT / top RANK ID LOGIT / end
Lines that begin with # are remarks; `# model FINGERPRINT` in a snapshot says which weights it is of.
"""
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ds4mlx.errors import UsageError

Mode = Literal["text", "chat"]
TOLERANCE = 4.0         # of log-probabilities: quantisation to 2 bits moves unlikely tokens by that much
OVERLAPS = {1: 1, 5: 4, 20: 15, 64: 40}     # of so many likeliest tokens of a snapshot, so many must be there
GOLDEN_TOLERANCE = 8.0  # of logits of a snapshot's 20 likeliest


@dataclass(frozen=True, slots=True)
class Step:
    selected: bytes
    top: tuple[tuple[bytes, float], ...]    # log-probabilities


@dataclass(frozen=True, slots=True)
class Official:
    id: str
    context: int
    prompt: str             # name of a file
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Golden:
    id: str
    mode: Mode
    context: int
    frontier: int           # tokens of the prompt that are computed
    prompt: str
    top: tuple[tuple[int, float], ...]      # id and logit, the likeliest first


@dataclass(frozen=True, slots=True)
class VectorFile:
    path: Path
    cases: tuple[Official | Golden, ...]
    model: str              # fingerprint of the weights of a snapshot; "" where it is not said

    def prompt_file(self, case: Official | Golden) -> Path:
        """Where a prompt lies: by its path from the file's folder or one above, else in the folder `prompts`."""
        folder = self.path.absolute().parent
        tried = [*(place / case.prompt for place in (folder, *folder.parents)),
                 folder / "prompts" / Path(case.prompt).name]
        found = next((path for path in tried if path.is_file()), None)
        if found is None:
            raise UsageError(f"{self.path}: the prompt {case.prompt} of {case.id} is neither there nor in "
                             f"{folder / 'prompts'}; get the folder with its prompts")
        return found


def read_vectors(path: Path) -> VectorFile:
    """Raises UsageError naming the line at fault."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"{path}: {getattr(fault, 'strerror', None) or 'not UTF-8'}; give a .vec file") from fault
    model = next((line.split()[2] for line in lines if line.startswith("# model ") and len(line.split()) == 3), "")
    cases = tuple(_cases(lines, str(path)))
    if not cases:
        raise UsageError(f"{path}: holds no case; give a .vec file")
    return VectorFile(path, cases, model)


def _cases(lines: Sequence[str], name: str) -> Iterator[Official | Golden]:
    head: list[str] = []
    body: list[list[str]] = []
    begun = 0
    for number, line in enumerate([*lines, "case"], 1):
        words = line.split()
        if not words or words[0].startswith("#") or words == ["end"]:
            continue
        if words[0] != "case":
            body.append(words)
            continue
        if head:
            try:
                yield _golden(head, body) if len(head) == 7 else _official(head, body)
            except (ValueError, IndexError) as fault:
                raise UsageError(f"{name}: the case of line {begun} is not of the format ({fault}); get a whole "
                                 "file") from fault
        head, body, begun = words, [], number


def _official(head: Sequence[str], body: Sequence[Sequence[str]]) -> Official:
    _, name, context, count, prompt = head
    steps: list[Step] = []
    for words in body:
        match words:
            case ["step", number, selected, _]:
                if int(number) != len(steps):
                    raise ValueError(f"step {number} where {len(steps)} is due")
                steps.append(Step(bytes.fromhex(selected), ()))
            case ["top", token, logprob]:
                steps[-1] = Step(steps[-1].selected, (*steps[-1].top, (bytes.fromhex(token), float(logprob))))
            case _:
                raise ValueError(f"a line {' '.join(words)[:40]!r}")
    if len(steps) != int(count) or not steps:
        raise ValueError(f"{len(steps)} steps of {count}")
    return Official(name, int(context), prompt, tuple(steps))


def _golden(head: Sequence[str], body: Sequence[Sequence[str]]) -> Golden:
    _, name, mode, context, frontier, prompt, count = head
    if mode not in get_args(Mode):
        raise ValueError(f"mode {mode}")
    top = []
    for word, rank, token, logit in body:
        if word != "top" or int(rank) - len(top) not in (0, 1):    # ranks begin at 0 or at 1
            raise ValueError(f"rank {rank} where {len(top)} is due")
        top.append((int(token), float(logit)))
    if len(top) != int(count) or not top:
        raise ValueError(f"{len(top)} tokens of {count}")
    return Golden(name, mode, int(context), int(frontier), prompt, tuple(top))


def step_faults(step: Step, logits: np.ndarray, ids: Mapping[bytes, Sequence[int]], tolerance: float) -> list[str]:
    """What is wrong with f32 [V] logits for an official step; `ids` has the tokens of each spelling."""
    logprobs = log_softmax(logits)
    best = int(logits.argmax())
    faults = []
    if best not in ids.get(step.selected, ()):
        faults.append(f"selected {_shown(ids, best)}, official {step.selected!r}")
    for spelling, official in step.top:
        found = max((float(logprobs[token]) for token in ids.get(spelling, ())), default=None)
        if found is None:
            faults.append(f"no token is spelled {spelling!r}")
        elif abs(found - official) > tolerance:
            faults.append(f"{spelling!r} has {found:.3f}, official {official:.3f}")
    return faults


def _shown(ids: Mapping[bytes, Sequence[int]], token: int) -> str:
    return next((repr(spelling) for spelling, tokens in ids.items() if token in tokens), f"the unused id {token}")


def golden_faults(case: Golden, logits: np.ndarray) -> list[str]:
    """What of f32 [V] logits has gone from a snapshot of the same weights."""
    faults = []
    known = [token for token, _ in case.top]
    order = np.argsort(-logits, kind="stable")
    for size, needed in OVERLAPS.items():
        if size <= len(known) and (same := len({*known[:size]} & {*order[:size].tolist()})) < needed:
            faults.append(f"{same} of the {size} likeliest tokens are the same, need {needed}")
    worst = max(abs(float(logits[token]) - logit) for token, logit in case.top[:20])
    if worst > GOLDEN_TOLERANCE:
        faults.append(f"a logit is {worst:.3f} away, need {GOLDEN_TOLERANCE} at most")
    return faults


def golden_text(case: Golden) -> str:
    """As it stands in a file."""
    head = f"case {case.id} {case.mode} {case.context} {case.frontier} {case.prompt} {len(case.top)}"
    tops = [f"top {rank} {token} {logit:.9g}" for rank, (token, logit) in enumerate(case.top)]
    return "\n".join([head, *tops, "end"])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f32 [V] -> f64 [V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())
