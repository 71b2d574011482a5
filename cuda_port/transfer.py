"""Between the card and the host: small arrays in a stream's order, and saved states (models/deepseek_v4/schema.py)."""
from collections.abc import Mapping

import numpy as np

from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.sizes import page_rows
from ds4mlx.cuda_port.state import Arena, LayerPlace, Rings
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.models.deepseek_v4 import schema

STATE_OF = {"comp": "cstate", "index": "istate"}    # how a compressor's frontier is called beside its rows


def arrays_of(arena: Arena, slot: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
    """The windows and frontiers of a slot u8 [slot bytes] at that many tokens, rings unrolled."""
    arrays, dtype = {}, np.uint8 if arena.sizes.packed else np.float32
    for i, place in enumerate(arena.layout.layers):
        ring = _window(arena, slot, place)
        last = ring[_window_positions(arena, tokens) % arena.sizes.ring]
        arrays[f"L{i}.raw"] = np.ascontiguousarray(last).view(dtype)
        for rings in place.compressors:
            held = _frontier(slot, rings)[_frontier_positions(place.ratio, tokens) % rings.held]
            for part, which, empty in (("kv", 0, 0.0), ("score", 1, -np.inf)):
                name = f"L{i}.{STATE_OF[rings.name]}_{part}"
                arrays[name] = schema.pack_frontier(np.ascontiguousarray(held[:, which]), tokens, place.ratio, empty)
    return arrays


def slot_of(arena: Arena, arrays: Mapping[str, np.ndarray], tokens: int) -> np.ndarray:
    """The inverse: a slot u8 [slot bytes]; what no position fills is 0."""
    slot = np.zeros(arena.layout.slot_bytes, np.uint8)
    for i, place in enumerate(arena.layout.layers):
        raw = np.ascontiguousarray(arrays[f"L{i}.raw"]).view(np.uint8)
        _window(arena, slot, place)[_window_positions(arena, tokens) % arena.sizes.ring] = raw
        for rings in place.compressors:
            at = _frontier_positions(place.ratio, tokens) % rings.held
            for which, part in enumerate(("kv", "score")):
                stored = arrays[f"L{i}.{STATE_OF[rings.name]}_{part}"]
                _frontier(slot, rings)[at, which] = schema.unpack_frontier(stored, tokens, place.ratio)
    return slot


def rows_of(arena: Arena, pages: list[int], first: int, last: int) -> dict[str, np.ndarray]:
    """Compressed rows that tokens first ... last - 1 complete; first is where a span begins."""
    arrays = {}
    for i, (place, pools) in enumerate(zip(arena.layout.layers, arena.pools, strict=True)):
        for rings, pool in zip(place.compressors, pools, strict=True):
            count = last // place.ratio - first // place.ratio
            held = pages[first // SPAN_TOKENS:first // SPAN_TOKENS - (-count // page_rows(place.ratio))]
            parts = [cp.asnumpy(pool[page]).reshape(-1, rings.row_bytes) for page in held]
            rows = np.concatenate(parts)[:count] if parts else np.zeros((0, rings.row_bytes), np.uint8)
            arrays[f"L{i}.{rings.name}"] = rows if arena.sizes.packed else rows.view(np.float32)
    return arrays


def put_rows(arena: Arena, arrays: Mapping[str, np.ndarray], pages: list[int]) -> None:
    """The inverse: all rows of a state into these pages."""
    for i, (place, pools) in enumerate(zip(arena.layout.layers, arena.pools, strict=True)):
        for rings, pool in zip(place.compressors, pools, strict=True):
            flat = np.ascontiguousarray(arrays[f"L{i}.{rings.name}"]).view(np.uint8).reshape(-1)
            for j, page in enumerate(pages):
                part = flat[j * pool.shape[1]:(j + 1) * pool.shape[1]]
                if part.size:
                    pool[page, :part.size] = cp.asarray(part)


def _window(arena: Arena, slot: np.ndarray, place: LayerPlace) -> np.ndarray:
    s = arena.sizes
    return slot[place.window:place.window + s.ring * s.row_bytes].reshape(s.ring, s.row_bytes)


def _frontier(slot: np.ndarray, rings: Rings) -> np.ndarray:
    """f32 [held, 2, columns], in place."""
    size = 8 * rings.held * rings.columns
    return slot[rings.offset:rings.offset + size].view(np.float32).reshape(rings.held, 2, rings.columns)


def _window_positions(arena: Arena, tokens: int) -> np.ndarray:
    return np.arange(max(0, tokens - arena.sizes.window), tokens)


def _frontier_positions(ratio: int, tokens: int) -> np.ndarray:
    """Of the tokens that are still needed: the open group's and, of ratio 4, those of the group before."""
    first = tokens - tokens % ratio
    return np.arange(first - 4 if ratio == 4 and tokens >= 4 else first, tokens)


def pinned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """A host array that copies to and from without the host waiting."""
    count = int(np.prod(shape))
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size), dtype, count).reshape(shape)


def send(target: "cp.ndarray", source: np.ndarray) -> None:
    """A contiguous pinned array to the card, in the current stream's order."""
    assert source.flags.c_contiguous and source.nbytes <= target.nbytes
    target.data.copy_from_host_async(source.ctypes.data, source.nbytes, cp.cuda.get_current_stream())


def receive(target: np.ndarray, source: "cp.ndarray") -> None:
    source.data.copy_to_host_async(target.ctypes.data, target.nbytes, cp.cuda.get_current_stream())
