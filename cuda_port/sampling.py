"""The next token of each row: bias, penalties, bans and masks on the card, then one launch for all rows."""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port import ops
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.transfer import pinned, receive, send
from ds4mlx.engine.protocol import Row, Step

STAGES = 4


@dataclass(frozen=True, slots=True)
class _Stage:
    """Host memory of one choice on its way: settings to the card, results back."""
    settings: np.ndarray    # f32 [rows, 4]
    top_k: np.ndarray       # i32 [rows]
    token: np.ndarray       # i32 [rows]
    report: np.ndarray      # f32 [rows, 2]


@dataclass(frozen=True, slots=True)
class Choice:
    """What has been sampled, on its way to the host."""
    rows: tuple[Row, ...]
    stage: _Stage
    there: "cp.cuda.Event"

    def steps(self, plain: Sequence["cp.ndarray"]) -> list[Step]:
        """Waits for the card. plain: each row's logits f32 [V], for those that report alternatives. Raises
        ArithmeticError for logits that are not finite, ValueError where nothing was left to choose."""
        self.there.synchronize()
        count = len(self.rows)
        if not np.isfinite(self.stage.report[:count, 0]).all():
            raise ArithmeticError("the model gave logits that are not finite; its file or the saved state is damaged")
        if not (self.stage.report[:count, 1] > -np.inf).all():
            raise ValueError("every token is banned or masked, one at least must be left; loosen the mask")
        return [Step(int(token), float(logprob), _best(logits, row.sampling.top_logprobs))
                for row, token, logprob, logits in zip(self.rows, self.stage.token, self.stage.report[:, 0], plain)]


class Sampler:
    """Buffers for up to `most` rows at a time."""

    def __init__(self, most: int) -> None:
        self._settings, self._top_k = cp.zeros((most, 4), cp.float32), cp.zeros(most, cp.int32)
        self._token, self._report = cp.zeros(most, cp.int32), cp.zeros((most, 2), cp.float32)
        self._stages = [_Stage(pinned((most, 4), np.float32), pinned((most,), np.int32), pinned((most,), np.int32),
                               pinned((most, 2), np.float32)) for _ in range(STAGES)]
        self._turn = 0

    def choose(self, rows: Sequence[Row], logits: "cp.ndarray", following: "cp.ndarray") -> Choice:
        """logits f32 [B, V] as the model gave them; following i32 [B] gets the tokens, for the step after this."""
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % STAGES
        for i, row in enumerate(rows):
            s = row.sampling
            stage.settings[i] = (uniform(s.seed, len(row.generated)) if s.temperature > 0 else 0, s.temperature,
                                 s.min_p, s.top_p)
            stage.top_k[i] = s.top_k
        send(self._settings, stage.settings)
        send(self._top_k, stage.top_k)
        ops.sample(adjusted(logits, rows), logits, self._settings, self._top_k, self._token, self._report, following)
        receive(stage.token, self._token)
        receive(stage.report, self._report)
        return Choice(tuple(rows), stage, cp.cuda.get_current_stream().record())


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of a step: a pure function, so that any engine and any order gives the same."""
    return np.random.Generator(np.random.Philox(key=seed, counter=step)).random()


def adjusted(logits: "cp.ndarray", rows: Sequence[Row]) -> "cp.ndarray":
    """The same array if no row changes any, else another: bias, then penalties over the generated tokens, then what is
    forbidden."""
    changed = {i: changes for i, row in enumerate(rows) if (changes := _changes(row))}
    if not changed and all(row.mask is None for row in rows):
        return logits
    after = logits.copy()
    for i, changes in changed.items():
        ids = cp.asarray(np.array(list(changes), np.int64))
        bias, repetition, less = cp.asarray(np.array(list(changes.values()), np.float32).T)
        x = after[i, ids] + bias
        after[i, ids] = cp.where(x > 0, x / repetition, x * repetition) - less
    for i, row in enumerate(rows):
        if row.mask is not None:
            after[i] = cp.where(cp.asarray(row.mask), after[i], -cp.inf)
    return after


def _changes(row: Row) -> dict[int, tuple[float, float, float]]:
    """By token: what is added to its logit, what it is then divided or multiplied by, what is then taken off."""
    s = row.sampling
    changes = {token: (bias, 1.0, 0.0) for token, bias in s.logit_bias.items()}
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
        for token, count in Counter(row.generated).items():
            changes[token] = (s.logit_bias.get(token, 0.0), s.repetition_penalty,
                              s.presence_penalty + s.frequency_penalty * count)
    for token in s.banned:
        changes[token] = (0.0, 1.0, np.inf)
    return changes


def _best(logits: "cp.ndarray", count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens with their log-probabilities, best first."""
    if not count:
        return ()
    x = cp.asnumpy(logits).astype(np.float64)
    order = np.argsort(-x, kind="stable")[:count]
    total = x.max() + np.log(np.exp(x - x.max()).sum())
    return tuple((int(i), float(x[i] - total)) for i in order)
