"""What a model computed on its way from tokens to logits, in NumPy: for people, and for directions to steer along."""
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self, runtime_checkable

import numpy as np

from ds4mlx.engine.protocol import Session
from ds4mlx.models.deepseek_v4.directions import Steering


@dataclass(frozen=True, slots=True, eq=False)
class LayerTaps:
    """One layer's part, for T tokens; H heads, S experts a token, N streams (4), D channels. f32 if not said otherwise.

    A half layer's output y goes into stream j as post[j] y + sum_i mix[i, j] stream[i].
    """
    streams: np.ndarray             # [T, N, D] after the layer
    attn: np.ndarray                # [T, D] output of the attention
    ffn: np.ndarray                 # [T, D] output of the experts
    attn_post: np.ndarray           # [T, N]
    attn_mix: np.ndarray            # [T, N, N], from a stream to a stream
    ffn_post: np.ndarray            # [T, N]
    ffn_mix: np.ndarray             # [T, N, N]
    experts: np.ndarray             # i32 [T, S], chosen by the router
    weights: np.ndarray             # [T, S], that their outputs are summed with
    window_mass: np.ndarray         # [T, H], share of attention that the last tokens' rows have
    compressed_mass: np.ndarray     # [T, H], that compressed rows have; what is left to 1 is the sink's
    rows: np.ndarray | None         # i32 [T, K], compressed rows attended to, -1 for none; None: no indexer chooses

    def __repr__(self) -> str:
        """Names and shapes: the numbers are pages."""
        arrays = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"<LayerTaps {', '.join(f'{name} {_shape(array)}' for name, array in arrays)}>"

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Of tokens that follow each other."""
        values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        rows = values.pop("rows")
        most = max((r.shape[1] for r in rows if r is not None), default=0)
        whole = [np.pad(r, ((0, 0), (0, most - r.shape[1])), constant_values=-1) for r in rows if r is not None]
        return cls(**{name: np.concatenate(arrays) for name, arrays in values.items()},
                   rows=np.concatenate(whole) if whole else None)


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Of T tokens, the first of them at position `start`."""
    start: int
    tokens: np.ndarray              # i32 [T]
    logits: np.ndarray              # f32 [T, vocab], for the token after each
    layers: dict[int, LayerTaps]    # those that were asked for

    def __repr__(self) -> str:
        return (f"<Taps of {len(self.tokens)} tokens from {self.start} on: tokens, logits {_shape(self.logits)}, "
                f"logprobs, layers {list(self.layers)}>")

    @property
    def logprobs(self) -> np.ndarray:
        """f32 [T, vocab], natural logarithms."""
        z = self.logits - self.logits.max(axis=-1, keepdims=True)
        found: np.ndarray = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        return found

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Of tokens that follow each other."""
        return cls(parts[0].start, np.concatenate([part.tokens for part in parts]),
                   np.concatenate([part.logits for part in parts]),
                   {layer: LayerTaps.joined([part.layers[layer] for part in parts]) for layer in parts[0].layers})


def _shape(array: np.ndarray | None) -> str:
    return "None" if array is None else str(list(array.shape))


@runtime_checkable
class Watcher(Protocol):
    """An engine that can tell what it computes, and be steered."""

    def watch(self, session: Session, tokens: Sequence[int], layers: Collection[int]) -> Taps:
        """`prefill`, telling of these layers. Sessions that are not watched do not notice."""
        ...

    def lens(self, streams: np.ndarray) -> np.ndarray:
        """Logits f32 [T, vocab] that the head would make of residual streams [T, N, D], of whatever layer."""
        ...

    def steer(self, steering: Steering | None) -> None:
        """All sessions, from what they compute next on; None: not at all."""
        ...
