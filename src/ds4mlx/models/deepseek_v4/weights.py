"""A validated GGUF to a model: every tensor to the attribute that its checkpoint name spells."""
import mmap

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ds4mlx.gguf.dequant import dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import names
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.layers import Linear
from ds4mlx.models.deepseek_v4.state import Rounding
from ds4mlx.ops import Blocks, arrange, device

# Stacks of which a chunk touches little: on the CPU they stay in the mapped file.
SPARSE = ("embed", "experts_w1", "experts_w2", "experts_w3")
METAL_PAGE = 16384


def load(file: GGUF, config: Config, kv_round: Rounding = "official") -> Model:
    """The model of a file that `names.validate` has accepted. Keep `file` open as long as the model lives.

    Matrices stay in their blocks; norms, biases and tables become float32 or int32 arrays. Tensors that share their
    bytes in the file share them in memory.
    """
    model = Model(config, kv_round)
    loaded: dict[tuple[int, str, tuple[int, ...]], Blocks] = {}
    for name, expected in names.expected_tensors(config).items():
        info = file.tensors[name]
        owner, leaf = _owner(model, expected.path)
        if not (isinstance(getattr(owner, leaf), Linear) or leaf in SPARSE):
            setattr(owner, leaf, mx.array(dequantize(file.raw(name), info.kind)))
            continue
        key = (info.offset, info.kind, info.shape)
        if key not in loaded:
            loaded[key] = _as_read(Blocks(_raw(file, name, sparse=leaf in SPARSE), info.kind), leaf)
        if leaf in SPARSE:
            setattr(owner, leaf, loaded[key])
        else:
            getattr(owner, leaf).weight = loaded[key]
    return model


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    *parents, leaf = path.split(".")
    owner = model
    for part in parents:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    return owner, leaf


def _raw(file: GGUF, name: str, sparse: bool) -> mx.array | np.ndarray:
    """The tensor's bytes: adopted on Metal without a copy; elsewhere copied, but left in the mapping if sparse on the
    CPU, where only the experts that a chunk selects are then ever read."""
    raw = file.raw(name)
    if device() == "metal":
        return _adopt(raw, file.map)
    return raw if sparse and device() == "cpu" else mx.array(raw)


def _as_read(w: Blocks, leaf: str) -> Blocks:
    """In the order in which the device multiplies it. Of the embedding rows are taken, and hyper-connections mix."""
    if leaf == "embed" or leaf.startswith("hc_"):
        return w
    ready = arrange(w)
    if ready is not w:
        mx.eval(ready.raw)      # or both orders of every matrix would be alive at once
    return ready


def _adopt(raw: np.ndarray, mapping: mmap.mmap) -> mx.array:
    """A Metal buffer over the file's own pages. Metal wants whole pages, GGUF aligns to 32 bytes: adopt the pages
    around the tensor and slice. The last tensor is copied when rounding up passes the end of the file.

    Not run on a Mac yet.
    """
    whole = np.frombuffer(mapping, np.uint8)
    start = raw.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    first = start // METAL_PAGE * METAL_PAGE
    last = -(-(start + raw.nbytes) // METAL_PAGE) * METAL_PAGE
    if last > whole.size:
        return mx.array(raw)
    pages = mx.asarray(whole[first:last], copy=False)
    return pages[start - first:start - first + raw.nbytes].reshape(raw.shape)
