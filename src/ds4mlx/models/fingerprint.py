"""The identity of a model file's weights, from its header and the ends of its tensors."""
import hashlib
import json

import numpy as np

from ds4mlx.gguf.reader import GGUF, TensorInfo
from ds4mlx.models.registry import family_of

END_BYTES = 4096
MAX_LISTED = 4096


def weights_fp(file: GGUF) -> str:
    """Hex SHA-256 over the model's metadata and, per tensor in name order, its entry and the hash of both its ends.

    The model's metadata are the architecture and the keys under it: a renamed file or another chat template is the
    same model. Widths of integers do not count. Reads at most 8 KiB of a tensor. Raises ModelFileError for a family
    that is not known.
    """
    architecture = family_of(file.metadata).architecture
    keys = {key: _plain(file.metadata[key]) for key in file.metadata if key.startswith(f"{architecture}.")}
    total = hashlib.sha256(_json({"general.architecture": architecture, **keys}))
    with file.scattered():
        for name, info in sorted(file.tensors.items()):
            total.update(_json([name, info.kind, list(info.shape), info.nbytes, _ends(file, info)]))
    return total.hexdigest()


def _ends(file: GGUF, info: TensorInfo) -> str:
    ends = hashlib.sha256()
    if info.nbytes:
        blocks = file.raw(info.name).reshape(-1)
        ends.update(blocks[:END_BYTES])
        ends.update(blocks[-END_BYTES:])
    return ends.hexdigest()


def _plain(value: object) -> object:
    """As JSON: arrays as lists, or as the hash of their bytes where a list would be large (no published key is)."""
    if not isinstance(value, np.ndarray):
        return value
    return value.tolist() if value.size <= MAX_LISTED else hashlib.sha256(value.tobytes()).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
