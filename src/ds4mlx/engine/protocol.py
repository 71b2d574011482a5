"""The engine boundary: tokens in, tokens out. Ints, floats and numpy; no text, no HTTP, no MLX.

An engine and its sessions belong to one thread, the one that opened the engine.
"""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

import numpy as np

from ds4mlx.config import BOUNDS

SPAN_TOKENS = 2048  # of a state that are stored together, once, for all conversations that begin with the same tokens

SAMPLING_BOUNDS = {
    "temperature": BOUNDS["temp"], **{name: BOUNDS[name] for name in ("top_p", "top_k", "min_p", "seed")},
    "presence_penalty": (-100, 100), "frequency_penalty": (-100, 100), "repetition_penalty": (0.01, 100),
    "top_logprobs": (0, 1 << 24)}

Progress = Callable[[int, int], None]   # bytes of weights that are loaded, of so many


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an open model is, without its weights."""
    name: str           # as the file says, for people
    context: int        # largest context the model was made for, in tokens
    vocab: int          # logits per position
    quant: str          # recipe of the routed experts, as "IQ2_XXS/Q2_K"
    backend: str        # for people: "mlx, Metal kernels", "stub"
    fingerprint: str    # hex; equal for equal weights
    base: str = ""      # hex; equal for all quantisations of one checkpoint, if the file says; else as fingerprint
    layout: str = ""    # hex; equal where a state's arrays mean the same
    quant_bits: int = 16    # of the routed experts; 16: not quantised


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits. Temperature 0 is the argmax, lowest id on ties.

    Order: logit_bias, penalties over the generated tokens, banned ids, then temperature, top_k, min_p, top_p.
    The uniform number of step i is a pure function of (seed, i).
    """
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0              # 0: off
    min_p: float = 0.05
    seed: int = 0               # [0, 2**64)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    banned: frozenset[int] = frozenset()
    top_logprobs: int = 0       # alternatives reported with each step

    def __post_init__(self) -> None:
        """Raises ValueError for a number that means nothing."""
        for name, (low, high) in SAMPLING_BOUNDS.items():
            value: float = getattr(self, name)
            if not isinstance(value, Real) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}, need a number from {low} to {high}")


@dataclass(frozen=True, slots=True)
class Step:
    """One sampled token. `logprob` is under the unmodified distribution (natural log); `top` is sorted, best first."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a number of sessions of a context size need, known before anything is allocated."""
    weights_bytes: int
    session_bytes: int      # one session, full
    sessions: int
    scratch_bytes: int
    limit_bytes: int

    @property
    def total_bytes(self) -> int:
        """Weights, all sessions, and what computing takes."""
        return self.weights_bytes + self.sessions * self.session_bytes + self.scratch_bytes

    @property
    def fits(self) -> bool:
        """Whether the limit holds all of it."""
        return self.total_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of arrays that exist now, and the most that existed at once. Mapped files are not among them."""
    active_bytes: int
    peak_bytes: int


class Snapshot(Protocol):
    """A session's state at one length, to be read piece by piece while the session goes on.

    A span is SPAN_TOKENS tokens, counted from the first. Rows that are only ever appended belong to the span whose
    tokens made them; all else, and the rows behind the last span asked for, are the head. Arrays are those of
    models/*/schema.py. Reading raises CheckpointError once the session has been rewound or restored.
    """
    tokens: np.ndarray                          # u32 [n]

    def head(self, spans: int) -> dict[str, np.ndarray]:
        """All but the rows of the first `spans` spans. Raises CheckpointError, as `span`."""
        ...

    def span(self, index: int) -> dict[str, np.ndarray]:
        """The rows of one span, some 7 MB for Flash."""
        ...


class Session(Protocol):
    """The state of one conversation."""
    tokens: Sequence[int]                       # what the state covers, exactly
    context: int                                # most tokens it may cover

    def logits(self) -> np.ndarray:
        """f32 [vocab] for the token after `tokens`, of which there must be one."""
        ...

    @property
    def marks(self) -> Sequence[int]:
        """Lengths that `rewind` reaches, in tokens, ascending."""
        ...

    def mark(self) -> None:
        """Make the present length a place to rewind to; a place of little use may be given up for it."""
        ...

    def rewind(self, length: int) -> int:
        """Go back to the largest reachable length <= `length`. Returns it; 0 where there is none."""
        ...

    def snapshot(self) -> Snapshot:
        """The state as it is, of one token at least. Costs no copy."""
        ...

    def branch(self, other: "Session", length: int) -> int:
        """Become the state of `other`, of the same engine, at its largest mark (or present length) <= `length`.

        Rows are shared and nothing is computed; `other` may be decoding. Returns that length, which is a mark from here
        on; 0, and an empty session, where there is none. What was here before is gone either way.
        """
        ...

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Become the state of these arrays, all of them whole. Raises CheckpointError and stays as it was."""
        ...

    def close(self) -> None:
        """Give its memory back; it is of no use after that."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One session's part in a decode step.

    `token` is the last sampled token, not yet in the session; None right after a prefill.
    `generated` are the answer's tokens so far, `token` last: its length is the step's number.
    `mask` bool [vocab], True where the next token is allowed.
    """
    session: Session
    sampling: Sampling
    token: int | None = None
    generated: Sequence[int] = ()
    mask: np.ndarray | None = None


class Engine(Protocol):
    """A model that computes. Sessions are its own: those of another engine are misuse."""
    info: ModelInfo

    def open(self, context: int) -> Session:
        """An empty session of so many tokens at most. Raises DoesNotFit."""
        ...

    def plan(self, context: int, sessions: int) -> MemoryPlan:
        """The memory that so many sessions would need; nothing is allocated."""
        ...

    def memory(self) -> MemoryUse:
        """The memory that is used now. From any thread."""
        ...

    def arrays(self, tokens: int) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        """Every array of a state of so many tokens: name -> (shape, dtype), in storage order."""
        ...

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """Compute these tokens behind those of the session, in one go: a slice of a prompt, a few thousand at most."""
        ...

    def decode(self, rows: Sequence[Row]) -> list[list[Step]]:
        """Feed each row's `token`, then sample the next, in one step for all rows. One list a row; longer than one
        where drafts held.

        Rows are of different sessions, in any order, and may join and leave from call to call. The last token of each
        list is sampled but not in the session yet. On an exception no session has advanced.
        """
        ...

    def close(self) -> None:
        """Give all memory back, that of its sessions too."""
        ...
