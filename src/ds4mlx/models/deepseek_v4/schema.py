"""The session state as named arrays: what a checkpoint holds, for any engine. numpy only.

With n tokens: per layer the last min(n, window) raw rows in order of position; n // ratio compressed rows; the
compressor's float32 frontier, its position biases already added to the scores. Ratio 128: the n mod 128 tokens of
the open group. Ratio 4: 8 slots, 0-3 the previous group, 4-7 the open one; what is never read again is 0 in k and
-inf in the scores, so that equal states have equal bytes.
"""
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4.config import Config


@dataclass(frozen=True, slots=True)
class Array:
    """Shape of a named array, and whether it holds rows (in the engine's row dtype) or float32 numbers."""
    shape: tuple[int, ...]
    rows: bool


def arrays(config: Config, tokens: int) -> dict[str, Array]:
    """Every array of a state that covers `tokens`, in storage order. `tokens` U32 and `logits` F32 come first."""
    out = {"tokens": Array((tokens,), False), "logits": Array((config.vocab_size,), False)}
    for i, ratio in enumerate(config.compress_ratios):
        out[f"L{i}.raw"] = Array((min(tokens, config.sliding_window), config.head_dim), True)
        if ratio:
            out |= _compressor(f"L{i}.comp", f"L{i}.cstate", ratio, config.head_dim, tokens)
        if ratio == 4:
            out |= _compressor(f"L{i}.index", f"L{i}.istate", ratio, config.index_head_dim, tokens)
    return out


def _compressor(rows: str, frontier: str, ratio: int, width: int, tokens: int) -> dict[str, Array]:
    shape = (8, 2 * width) if ratio == 4 else (tokens % ratio, width)
    return {rows: Array((tokens // ratio, width), True), f"{frontier}_kv": Array(shape, False),
            f"{frontier}_score": Array(shape, False)}


def check(config: Config, found: Mapping[str, np.ndarray], row_dtype: np.dtype) -> int:
    """The number of tokens that the arrays cover. Raises CheckpointError when a name, shape or dtype is not right."""
    if "tokens" not in found or found["tokens"].ndim != 1:
        raise CheckpointError("state holds no list of tokens; it cannot be used")
    n = len(found["tokens"])
    expected = arrays(config, n)
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())[:3]
        raise CheckpointError(f"state of {n} tokens differs in its arrays ({', '.join(odd)}, …); it is another model's")
    for name, array in expected.items():
        dtype = np.dtype(np.uint32) if name == "tokens" else row_dtype if array.rows else np.dtype(np.float32)
        if (found[name].shape, found[name].dtype) != (array.shape, dtype):
            raise CheckpointError(f"{name} is {found[name].dtype} {list(found[name].shape)}, "
                                  f"need {dtype} {list(array.shape)}; save the state again with this engine's settings")
    if n and int(found["tokens"].max()) >= config.vocab_size:
        raise CheckpointError(f"state names token {int(found['tokens'].max())}, vocabulary has {config.vocab_size}")
    return n


def pack_frontier(a: np.ndarray, tokens: int, ratio: int, width: int, empty: float) -> np.ndarray:
    """A frontier as the graph keeps it (`compressor.py`) to its stored shape."""
    if ratio != 4:
        return a
    out = np.full((8, 2 * width), empty, np.float32)
    held = 4 if tokens >= 4 else 0
    out[:held, :width] = a[:held, :width]
    out[4:4 + tokens % 4] = a[held:]
    return out


def unpack_frontier(stored: np.ndarray, tokens: int, ratio: int) -> np.ndarray:
    """The inverse of pack_frontier; halves that are never read again come back as stored."""
    if ratio != 4:
        return stored
    return np.concatenate([stored[:4 if tokens >= 4 else 0], stored[4:4 + tokens % 4]])


def session_bytes(config: Config, tokens: int, row_bytes: int) -> int:
    """Bytes of a state that covers `tokens`, with rows of `row_bytes` a number."""
    return _bytes(arrays(config, tokens), row_bytes)


def mark_bytes(config: Config, row_bytes: int) -> int:
    """Bytes of what is not append-only, at most: the window, the frontiers and the logits, whatever the length."""
    fullest = arrays(config, 128 * config.sliding_window - 1)  # a whole window, every group one token short
    held = {name: a for name, a in fullest.items() if not name.endswith(("tokens", ".comp", ".index"))}
    return _bytes(held, row_bytes)


def _bytes(of: Mapping[str, Array], row_bytes: int) -> int:
    return sum(int(np.prod(a.shape, dtype=np.int64)) * (row_bytes if a.rows else 4) for a in of.values())
