"""Checkpoints of training: weights in half precision or, where few bits will hold them in the end, in bytes.

Expert matrices are kept as int8 with a scale for each 32 weights, 0.4 % off; all else as float16. A checkpoint is
split over files of a few megabytes each; optimizers begin anew.
"""
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ds4mlx.errors import CheckpointError

PART_BYTES = 14 << 20
GROUP = 32          # weights to a scale
PACKED = ".experts_w"


def save(stem: Path, weights: Mapping[str, np.ndarray], about: Mapping[str, object]) -> list[Path]:
    """Write `stem`.0.npz, `stem`.1.npz …; each appears whole. `about` is JSON, for whoever resumes."""
    parts: list[dict[str, np.ndarray]] = [{"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}]
    size = 0
    for path, array in weights.items():
        stored = _packed(path, array)
        nbytes = sum(a.nbytes for a in stored.values())
        if size + nbytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1] |= stored
        size += nbytes
    files = []
    for i, part in enumerate(parts):
        file = stem.with_name(f"{stem.name}.{i}.npz")
        writing = file.with_suffix(".writing")
        with open(writing, "wb") as out:
            np.savez(out, **part)
        os.replace(writing, file)
        files.append(file)
    return files


def load(files: Iterable[Path]) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Weights, f32 and i64, and what was said about them."""
    stored: dict[str, np.ndarray] = {}
    for file in files:
        with np.load(file) as data:
            stored |= dict(data)
    about = json.loads(stored.pop("about").tobytes())
    return {path: _unpacked(path, array, stored) for path, array in stored.items()
            if not path.endswith("|scale")}, about


def with_layers(weights: Mapping[str, np.ndarray], kept: Sequence[int]) -> dict[str, np.ndarray]:
    """The weights of a model that has only these layers, in this order. Raises CheckpointError."""
    layers = {int(path.split(".")[1]) for path in weights if path.startswith("layers.")}
    if not layers.issuperset(kept) or len(set(kept)) < len(kept):
        raise CheckpointError(f"layers {list(kept)} are to be kept; need different ones of {sorted(layers)}")
    place = {f"layers.{layer}": f"layers.{i}" for i, layer in enumerate(kept)}
    parts = ((path, ".".join(path.split(".")[:2])) for path in weights)
    return {place.get(stem, stem) + path[len(stem):]: weights[path] for path, stem in parts
            if stem in place or not path.startswith("layers.")}


def _packed(path: str, array: np.ndarray) -> dict[str, np.ndarray]:
    if array.dtype.kind == "i":
        return {path: array.astype(np.uint8)}       # expert ids
    if PACKED not in path:
        return {path: array.astype(np.float16)}
    groups = array.astype(np.float32).reshape(*array.shape[:-1], -1, GROUP)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(groups / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
    return {path: codes.reshape(array.shape), f"{path}|scale": scale[..., 0]}


def _unpacked(path: str, array: np.ndarray, stored: Mapping[str, np.ndarray]) -> np.ndarray:
    if array.dtype == np.uint8:
        return array.astype(np.int64)
    if array.dtype != np.int8:
        return array.astype(np.float32)
    scale = stored[f"{path}|scale"].astype(np.float32)[..., None]
    return (array.reshape(*array.shape[:-1], -1, GROUP) * scale).reshape(array.shape).astype(np.float32)
