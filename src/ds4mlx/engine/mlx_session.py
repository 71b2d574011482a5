"""The state of one conversation in MLX: its tokens, its layers' caches, and the places it can go back to."""
from dataclasses import dataclass
from typing import BinaryIO

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as container

from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.state import CompressorState, LayerMark, LayerState

MARKS = 16            # places to rewind to that a session keeps
MARK_EVERY = 2048     # tokens of prefill between automatic marks


@dataclass(frozen=True, slots=True)
class Mark:
    length: int
    layers: tuple[LayerMark, ...]
    logits: mx.array | None    # None at length 0


class MLXSession:
    """See engine.protocol.Session."""

    def __init__(self, model: Model, context: int) -> None:
        self.tokens: list[int] = []
        self.context = context
        self.cache: list[LayerState] = model.make_cache(context)
        self._model = model
        self._next: mx.array | None = None
        self._marks: list[Mark] = []
        self._start = self._here()

    def feed(self, tokens: list[int]) -> None:
        """Take tokens in. On failure the session is as it was before."""
        if len(self.tokens) + len(tokens) > self.context:
            raise ValueError(f"{len(self.tokens)} + {len(tokens)} tokens, context is {self.context}")
        before = self._here()
        try:
            streams, update = self._model.streams(mx.array(tokens, mx.int32), self.cache)
            self._next = self._model.logits(streams[-1:], update.rows(slice(-1, None)))[0]
            mx.eval(self._next, [layer.state for layer in self.cache])
        except BaseException:
            self._go_to(before)
            raise
        self.tokens.extend(tokens)
        if len(tokens) > 1 and len(self.tokens) % MARK_EVERY == 0:
            self.mark()

    def next_logits(self) -> mx.array:
        """f32 [V] on the device."""
        if self._next is None:
            raise ValueError("an empty session has no next token; prefill first")
        return self._next

    def logits(self) -> np.ndarray:
        return np.array(self.next_logits())

    def mark(self) -> None:
        if not self.tokens or self._marks and self._marks[-1].length == len(self.tokens):
            return
        self._marks.append(self._here())
        if len(self._marks) > MARKS:
            del self._marks[self._least_useful()]

    def _least_useful(self) -> int:
        """The mark whose loss leaves the smallest gap for its age: distances double going back. The first and the
        last two stay."""
        at = [m.length for m in self._marks]
        now = len(self.tokens) + 1
        return min(range(1, len(at) - 2), key=lambda i: (at[i + 1] - at[i - 1]) / (now - at[i]))

    def rewind(self, length: int) -> int:
        if length >= len(self.tokens):
            return len(self.tokens)
        self._marks = [m for m in self._marks if m.length <= length]
        mark = self._marks[-1] if self._marks else self._start
        self._go_to(mark)
        del self.tokens[mark.length:]
        return mark.length

    def _here(self) -> Mark:
        return Mark(len(self.tokens), tuple(layer.mark() for layer in self.cache), self._next)

    def _go_to(self, mark: Mark) -> None:
        for layer, state in zip(self.cache, mark.layers, strict=True):
            layer.rewind(state)
        self._next = mark.logits

    def save(self, out: BinaryIO) -> None:
        """The arrays of schema.arrays in a safetensors container, rows in the dtype they are held in."""
        n = len(self.tokens)
        arrays = {"tokens": np.array(self.tokens, np.uint32), "logits": self.logits()}
        for i, layer in enumerate(self.cache):
            arrays[f"L{i}.raw"] = np.array(layer.window)
            for rows, frontier, c in _compressors(i, layer):
                arrays[rows] = np.array(c.rows.view())
                k, s = np.array(c.frontier).swapaxes(0, 1)
                arrays[f"{frontier}_kv"] = schema.pack_frontier(k, n, layer.ratio, 0.0)
                arrays[f"{frontier}_score"] = schema.pack_frontier(s, n, layer.ratio, -np.inf)
        out.write(container.save(arrays, {"format": "ds4mlx-state/1"}))

    def load(self, src: BinaryIO) -> None:
        raw = src.read()
        try:
            arrays = container.load(raw)
        except (SafetensorError, KeyError) as error:  # KeyError: a type that NumPy lacks
            raise CheckpointError(f"not a saved state: {error}") from error
        n = schema.check(self._model.config, arrays, packed=self._model.rounding == "official")
        if not 0 < n <= self.context:
            raise CheckpointError(f"state covers {n} tokens, this session takes 1 to {self.context}")
        if not np.isfinite(arrays["logits"]).all():
            raise CheckpointError("state holds logits that are not finite; it is damaged")
        cache = self._model.make_cache(self.context)
        for i, layer in enumerate(cache):
            layer.offset, layer.window = n, mx.array(arrays[f"L{i}.raw"])
            for rows, frontier, c in _compressors(i, layer):
                c.rows.append(mx.array(arrays[rows]))
                k, s = (schema.unpack_frontier(arrays[f"{frontier}_{part}"], n, layer.ratio)
                        for part in ("kv", "score"))
                c.frontier = mx.array(np.stack([k, s], axis=1))
        mx.eval([layer.state for layer in cache])
        self.cache, self._marks, self._next = cache, [], mx.array(arrays["logits"])
        self.tokens[:] = arrays["tokens"].tolist()
        self.mark()

    def close(self) -> None:
        self.tokens.clear()
        self.cache, self._marks, self._next = [], [], None


def _compressors(i: int, layer: LayerState) -> list[tuple[str, str, CompressorState]]:
    named = [(f"L{i}.comp", f"L{i}.cstate", layer.compressed), (f"L{i}.index", f"L{i}.istate", layer.index)]
    return [entry for entry in named if entry[2] is not None]
