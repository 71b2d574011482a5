"""The next token of each row: bias, penalties, bans and masks, then one draw for all rows. Nothing is read here that is
not on the host already, so the device may go on before the tokens are known."""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.engine.protocol import Row, Sampling, Step


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What has been sampled, still on the device."""
    tokens: mx.array                # i32 [B]
    logprobs: mx.array              # f32 [B], under the unmodified distribution
    allowed: mx.array               # bool [B]: a token was left to choose
    listed: tuple[int, ...]         # rows that report alternatives
    best: mx.array | None           # i32 [listed, most], best first
    best_logprobs: mx.array | None

    @classmethod
    def of(cls, logits: mx.array, rows: Sequence[Row]) -> Self:
        """logits f32 [B, V], as the model gave them."""
        how = [row.sampling for row in rows]
        adjusted = _masked(_adjusted(logits, rows), rows)
        tokens = ops.sample(adjusted, _uniforms(rows), *_parameters(how))
        total = mx.logsumexp(logits, axis=-1)
        listed = tuple(i for i, s in enumerate(how) if s.top_logprobs)
        best = best_logprobs = None
        if listed:
            some = logits[mx.array(listed)]
            best = mx.argsort(-some, axis=-1)[:, :max(s.top_logprobs for s in how)]
            best_logprobs = mx.take_along_axis(some, best, axis=-1) - total[mx.array(listed)][:, None]
        at = tokens[:, None]
        logprobs = mx.take_along_axis(logits, at, axis=-1)[:, 0] - total
        return cls(tokens, logprobs, mx.take_along_axis(adjusted, at, axis=-1)[:, 0] > -mx.inf, listed, best,
                   best_logprobs)

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.tokens, self.logprobs, self.allowed, self.best, self.best_logprobs) if a is not None]

    def steps(self, rows: Sequence[Row]) -> list[Step]:
        """Waits for the device. Raises ArithmeticError for logits that are not finite, ValueError where nothing was
        left to choose."""
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        if not np.isfinite(logprobs).all():
            raise ArithmeticError("the model gave logits that are not finite; its file or the saved state is damaged")
        if not all(self.allowed.tolist()):
            raise ValueError("every token is banned or masked, one at least must be left; loosen the mask")
        top: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        if self.listed:
            for i, ids, values in zip(self.listed, self.best.tolist(), self.best_logprobs.tolist(), strict=True):
                top[i] = tuple(zip(ids, values, strict=True))[:rows[i].sampling.top_logprobs]
        return [Step(*step) for step in zip(tokens, logprobs, top, strict=True)]


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of a step: a pure function, so that any engine and any order gives the same."""
    return np.random.Generator(np.random.Philox(key=seed, counter=step)).random()


def _uniforms(rows: Sequence[Row]) -> np.ndarray:
    return np.array([uniform(row.sampling.seed, len(row.generated)) if row.sampling.temperature > 0 else 0.0
                     for row in rows], np.float32)


def _parameters(how: Sequence[Sampling]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (np.array([s.temperature for s in how], np.float32), np.array([s.top_k for s in how], np.int32),
            np.array([s.min_p for s in how], np.float32), np.array([s.top_p for s in how], np.float32))


@dataclass(slots=True)
class _Change:
    """What becomes of one logit: x + bias, then over or times the repetition penalty, then less the rest."""
    bias: float = 0.0
    repetition: float = 1.0
    less: float = 0.0       # inf where the token is banned


def _changes(row: Row) -> dict[int, _Change]:
    """By token. Bias, then penalties over the generated tokens, then what is forbidden."""
    s = row.sampling
    changes = {token: _Change(bias) for token, bias in s.logit_bias.items()}
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
        for token, count in Counter(row.generated).items():
            change = changes.setdefault(token, _Change())
            change.repetition = s.repetition_penalty
            change.less = s.presence_penalty + s.frequency_penalty * count
    for token in s.banned:
        changes.setdefault(token, _Change()).less = np.inf
    return changes


def _adjusted(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Only the logits that some row changes are touched, those of all rows at once."""
    changes = [(i, token, change) for i, row in enumerate(rows) for token, change in _changes(row).items()]
    if not changes:
        return logits
    if odd := [token for _, token, _ in changes if not 0 <= token < logits.shape[1]]:
        raise ValueError(f"bias, bans or penalties for token {odd[0]}, vocabulary has {logits.shape[1]}")
    row, token = (mx.array([entry[i] for entry in changes], mx.int32) for i in (0, 1))
    bias, repetition, less = (mx.array([getattr(entry[2], name) for entry in changes], mx.float32)
                              for name in ("bias", "repetition", "less"))
    x = logits[row, token] + bias
    after = mx.array(logits)        # a value of its own
    after[row, token] = mx.where(x > 0, x / repetition, x * repetition) - less
    return after


def _masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return logits
    allowed = mx.array(np.stack(list(masks.values())))
    if len(masks) == len(rows):
        return mx.where(allowed, logits, -mx.inf)
    which, after = mx.array(list(masks)), mx.array(logits)
    after[which] = mx.where(allowed, logits[which], -mx.inf)
    return after
