"""What a conversion will write: every tensor with its type, and the keys of the file. Reads no weights."""
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from ds4mlx import __version__
from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.blocks import row_bytes
from ds4mlx.gguf.writer import Layout, Value, layout
from ds4mlx.models.deepseek_v4.names import MAX_REPORTED, Expected, expected_tensors
from ds4mlx.quant.checkpoint import Checkpoint, Part
from ds4mlx.quant.encode import SEARCHED
from ds4mlx.quant.importance import Importance
from ds4mlx.quant.recipe import Recipe
from ds4mlx.text.vocabulary import gguf_keys

FILE_TYPE = 19          # general.file_type of published q2 files; no reader decides by it
BLOCKS_VERSION = 2      # general.quantization_version: of the block formats


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the file."""
    name: str
    kind: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]     # one, or the experts in order

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1])


@dataclass(frozen=True)
class Plan:
    """The whole file."""
    checkpoint: Checkpoint
    tensors: tuple[Planned, ...]
    metadata: Mapping[str, Value]
    importance: Importance | None

    @cached_property
    def layout(self) -> Layout:
        return layout(self.metadata, [(t.name, t.kind, t.shape) for t in self.tensors])

    @cached_property
    def unweighed(self) -> tuple[str, ...]:
        """Tensors that importance matters for, but nothing is known of. Raises ModelFileError where what is known is of
        another shape: an imatrix of another model is refused before hours of work."""
        return tuple(tensor.name for tensor in self.tensors if tensor.kind in SEARCHED
                     and any(self.importance_of(tensor, expert) is None for expert in range(len(tensor.parts))))

    def importance_of(self, tensor: Planned, expert: int) -> np.ndarray | None:
        """f32 [width] for one of the tensor's parts, or None where nothing is known or nothing is searched."""
        if self.importance is None or tensor.kind not in SEARCHED:
            return None
        return self.importance.of((tensor.name, tensor.parts[expert].name), expert, len(tensor.parts), tensor.shape[-1])


def make_plan(checkpoint: Checkpoint, recipe: Recipe, importance: Importance | None, name: str) -> Plan:
    """The file of a checkpoint that is called `name`. Raises ModelFileError for a checkpoint that is not whole,
    UsageError for a recipe that does not go with it."""
    expected = expected_tensors(checkpoint.config)
    stored, layers = _all_parts(checkpoint, expected), checkpoint.config.num_hidden_layers
    tensors = []
    for tensor, need in expected.items():
        parts = stored[tensor]
        tensors.append(Planned(tensor, recipe.kind(tensor, need, parts[0].form, layers), need.shape, parts))
    plan = Plan(checkpoint, tuple(tensors), _metadata(checkpoint, recipe, importance, name), importance)
    searched = [planned for planned in tensors if planned.kind in SEARCHED]
    if importance is not None and searched and len(plan.unweighed) == len(searched):
        raise ModelFileError(f"{importance.path}: has nothing for {searched[0].name} or any other matrix that it "
                             "matters for; give the imatrix of this model")
    return plan


def _all_parts(checkpoint: Checkpoint, expected: Mapping[str, Expected]) -> dict[str, tuple[Part, ...]]:
    """Every tensor's parts. Raises ModelFileError with all that is missing or of another shape."""
    found, problems = {}, []
    for tensor, need in expected.items():
        try:
            found[tensor] = checkpoint.parts(need)
        except ModelFileError as fault:
            problems.append(str(fault))
    if problems:
        rest = [f"and {len(problems) - MAX_REPORTED} more"] if len(problems) > MAX_REPORTED else []
        raise ModelFileError("\n  ".join([f"{checkpoint.directory}: not a whole DeepSeek V4 checkpoint:",
                                          *problems[:MAX_REPORTED], *rest]))
    return found


def _metadata(checkpoint: Checkpoint, recipe: Recipe, importance: Importance | None, name: str) -> dict[str, Value]:
    source = str(checkpoint.directory / "tokenizer.json")
    keys: dict[str, Value] = checkpoint.config.to_gguf() | gguf_keys(checkpoint.vocabulary(),
                                                                     checkpoint.config.vocab_size, source)
    keys |= {"general.name": name, "general.file_type": FILE_TYPE, "general.quantization_version": BLOCKS_VERSION,
             "ds4mlx.creator": f"ds4mlx {__version__}", "ds4mlx.recipe": recipe.describe(),
             "ds4mlx.checkpoint": name, "ds4mlx.source_fp": checkpoint.fingerprint(name)}
    if (temperature := checkpoint.temperature()) is not None:
        keys["general.sampling.temp"] = temperature
    if importance is not None:
        with open(importance.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        keys |= {"ds4mlx.imatrix_sha256": digest,
                 "quantize.imatrix.file": importance.path.name, "quantize.imatrix.dataset": importance.dataset,
                 "quantize.imatrix.entries_count": len(importance.entries),
                 "quantize.imatrix.chunks_count": importance.chunks}
    return keys


def checkpoint_name(directory: Path) -> str:
    """What a checkpoint is called where nobody says: its directory."""
    return directory.resolve().name
