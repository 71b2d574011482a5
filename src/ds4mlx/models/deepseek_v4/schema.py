"""The session state as named arrays: what a checkpoint holds, for any engine. numpy only.

With n tokens: per layer the last min(n, window) raw rows in order of position; n // ratio compressed rows; the
compressor's float32 frontier, its position biases already added to the scores. Ratio 128: the n mod 128 tokens of
the open group. Ratio 4: 8 slots, 0-3 the previous group, 4-7 the open one; what is never read again is 0 in k and
-inf in the scores, so that equal states have equal bytes.
"""
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4.config import Config


@dataclass(frozen=True, slots=True)
class Row:
    """How a row is held: packed bytes, or float32 channels."""
    width: int
    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Array:
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


ABI = 1     # of a state: raise it when the same arrays come to mean something else
F32, U32, U8 = np.dtype(np.float32), np.dtype(np.uint32), np.dtype(np.uint8)


def attention_row(config: Config, packed: bool) -> Row:
    """Packed: an E4M3 code a channel, an exponent for 64 of them, a byte to make that even; the rotary tail in float16.

    584 bytes for Flash, of the 2048 that float32 takes, and lossless: the model rounds its rows to that.
    """
    if not packed:
        return Row(config.head_dim, F32)
    codes = config.head_dim - config.qk_rope_head_dim
    return Row(codes + -(-codes // 128) * 2 + 2 * config.qk_rope_head_dim, U8)


def index_row(config: Config, packed: bool) -> Row:
    """Packed: an E2M1 code of four bits a channel, an exponent for 32 of them."""
    width = config.index_head_dim
    return Row(width // 2 + width // 32, U8) if packed else Row(width, F32)


def arrays(config: Config, tokens: int, packed: bool) -> dict[str, Array]:
    """Every array of a state that covers `tokens`, in storage order. `tokens` and `logits` come first."""
    row, index = attention_row(config, packed), index_row(config, packed)
    out = {"tokens": Array((tokens,), U32), "logits": Array((config.vocab_size,), F32)}
    for i, ratio in enumerate(config.compress_ratios):
        out[f"L{i}.raw"] = Array((min(tokens, config.sliding_window), row.width), row.dtype)
        if ratio:
            out |= _compressor(f"L{i}.comp", f"L{i}.cstate", ratio, config.head_dim, row, tokens)
        if ratio == 4:
            out |= _compressor(f"L{i}.index", f"L{i}.istate", ratio, config.index_head_dim, index, tokens)
    return out


def _compressor(rows: str, frontier: str, ratio: int, width: int, row: Row, tokens: int) -> dict[str, Array]:
    shape = (8, 2 * width) if ratio == 4 else (tokens % ratio, width)
    return {rows: Array((tokens // ratio, row.width), row.dtype), f"{frontier}_kv": Array(shape, F32),
            f"{frontier}_score": Array(shape, F32)}


def check(config: Config, found: Mapping[str, np.ndarray], packed: bool) -> int:
    """The number of tokens that the arrays cover. Raises CheckpointError when a name, shape or dtype is not right."""
    if "tokens" not in found or found["tokens"].ndim != 1:
        raise CheckpointError("state holds no list of tokens; it cannot be used")
    n = len(found["tokens"])
    expected = arrays(config, n, packed)
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())[:3]
        raise CheckpointError(f"state of {n} tokens differs in its arrays ({', '.join(odd)}, …); it is another model's")
    for name, array in expected.items():
        if (found[name].shape, found[name].dtype) != (array.shape, array.dtype):
            raise CheckpointError(f"{name} is {found[name].dtype} {list(found[name].shape)}, need {array.dtype} "
                                  f"{list(array.shape)}; save the state again with this engine's settings")
    if n and int(found["tokens"].max()) >= config.vocab_size:
        raise CheckpointError(f"state names token {int(found['tokens'].max())}, vocabulary has {config.vocab_size}")
    return n


def frontier_shape(ratio: int, width: int) -> tuple[int, int, int]:
    """Of a frontier with room for all the tokens that a decode step needs: those of two groups where groups overlap."""
    groups = 2 if ratio == 4 else 1
    return groups * ratio, 2, groups * width


def pack_frontier(a: np.ndarray, tokens: int, ratio: int, empty: float) -> np.ndarray:
    """k or s of a frontier as the graph keeps it (`ops.compress_step`) in its stored shape."""
    if ratio != 4:
        return np.ascontiguousarray(a)
    out = np.full((8, a.shape[1]), empty, np.float32)
    held, width = 4 if tokens >= 4 else 0, a.shape[1] // 2
    out[:held, :width] = a[:held, :width]
    out[4:4 + tokens % 4] = a[held:]
    return out


def unpack_frontier(stored: np.ndarray, tokens: int, ratio: int) -> np.ndarray:
    """The inverse of pack_frontier; halves that are never read again come back as stored."""
    if ratio != 4:
        return stored
    return np.concatenate([stored[:4 if tokens >= 4 else 0], stored[4:4 + tokens % 4]])


def rows_of(config: Config, first: int, last: int) -> dict[str, slice]:
    """Of each array of append-only rows, those that tokens first … last - 1 complete."""
    rows = {}
    for i, ratio in enumerate(config.compress_ratios):
        if ratio:
            rows[f"L{i}.comp"] = slice(first // ratio, last // ratio)
        if ratio == 4:
            rows[f"L{i}.index"] = slice(first // ratio, last // ratio)
    return rows


def layout_fp(config: Config, packed: bool) -> str:
    """Hex SHA-256 of all that decides what a state's numbers mean, but for the weights and the tokens."""
    values = asdict(config) | {"packed": packed, "abi": ABI}
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def session_bytes(config: Config, tokens: int, packed: bool) -> int:
    """Bytes of a state that covers `tokens`."""
    return sum(a.nbytes for a in arrays(config, tokens, packed).values())


def mark_bytes(config: Config, packed: bool) -> int:
    """Bytes of what is not append-only, at most: the window, the frontiers and the logits, whatever the length."""
    fullest = arrays(config, 128 * config.sliding_window - 1, packed)  # a whole window, all groups one token short
    return sum(a.nbytes for name, a in fullest.items() if not name.endswith(("tokens", ".comp", ".index")))


def step_bytes(config: Config, packed: bool) -> int:
    """Bytes of what a decode step replaces: one sequence's window, frontiers and logits, at their fullest."""
    total = 4 * config.vocab_size
    for ratio in config.compress_ratios:
        row = attention_row(config, packed)
        total += config.sliding_window * row.width * row.dtype.itemsize
        widths = [config.head_dim] * (ratio > 0) + [config.index_head_dim] * (ratio == 4)
        total += sum(4 * math.prod(frontier_shape(ratio, width)) for width in widths)
    return total
