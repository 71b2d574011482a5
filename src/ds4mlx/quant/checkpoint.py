"""An official or transformers-saved DeepSeek V4 checkpoint: its configuration, and any tensor of the model by rows.

Tensors are asked for by the path of `names.Expected`, which is the official name with experts stacked. A checkpoint may
spell them officially, with a prefix, or as transformers does, with or without its stacks.
"""
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds4mlx.errors import ModelFileError
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.names import Expected
from ds4mlx.quant import stored
from ds4mlx.quant.safetensors import Shards, Stored
from ds4mlx.quant.spelling import expert_stack, official_name, spellings
from ds4mlx.quant.transformers_config import official_config

SCALES = (".scale", ".weight_scale_inv", ".weight_scale")   # of an FP8 or FP4 matrix, in place of `.weight`


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor, or one expert of a stack, in the way it is stored. `rows` are of its last axis but one."""
    name: str               # in the checkpoint
    shape: tuple[int, ...]
    form: str               # "FP4", "FP8", "BF16", "F16", "F32", "I32", "I64"
    codes: np.ndarray       # u8 [rows, bytes of a row], a view of the file
    scale: np.ndarray | None    # u8 [rows, K / 32] for FP4, f32 [rows / 128, K / 128] for FP8

    def rows(self, start: int, stop: int) -> np.ndarray:
        """[stop - start, K] float32, or int64 for tables. Raises ModelFileError for what is not finite."""
        codes = self.codes[start:stop]
        if self.form == "FP4":
            values = stored.fp4(codes, self.scale[start:stop])
        elif self.form == "FP8":
            values = stored.fp8(codes, self.scale, start)
        else:
            values = stored.plain(codes, self.form)
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {self.name} has weights that are not finite in rows {start} to {stop}; "
                                 "download the checkpoint again")
        return values

    def mxfp4(self, start: int, stop: int) -> np.ndarray:
        """The rows as MXFP4 blocks, without rounding. Only for FP4. Raises ModelFileError."""
        scale = self.scale[start:stop]
        if (scale == 255).any():
            raise ModelFileError(f"tensor {self.name} has scales that are not finite in rows {start} to {stop}; "
                                 "download the checkpoint again")
        return stored.mxfp4_blocks(self.codes[start:stop], scale)


class Checkpoint:
    """See above."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelFileError where the directory holds no checkpoint of this family."""
        self.directory = directory
        self.config = Config.from_official(official_config(_json(directory / "config.json")))
        self.shards = Shards(directory)

    def vocabulary(self) -> dict[str, object]:
        """tokenizer.json. Raises ModelFileError."""
        return _json(self.directory / "tokenizer.json")

    def temperature(self) -> float | None:
        """What generation_config.json, where there is one, recommends; 0 for always the likeliest token."""
        path = self.directory / "generation_config.json"
        told = _json(path) if path.exists() else {}
        wanted = 0.0 if told.get("do_sample") is False else told.get("temperature")
        return float(wanted) if isinstance(wanted, int | float) else None

    def fingerprint(self, name: str) -> str:
        """Hex SHA-256 of the checkpoint's name and its tensors: `ds4mlx.source_fp`."""
        return hashlib.sha256(json.dumps([name, self.shards.digest()]).encode()).hexdigest()

    def parts(self, need: Expected) -> "tuple[Part, ...]":
        """The tensor, or its experts in order. Raises ModelFileError where it is missing or of another shape."""
        stack = expert_stack(need.path)
        if stack is None:
            return (self._part(official_name(need.path), need.shape),)
        experts, shape = need.shape[0], need.shape[1:]
        if (whole := self.shards.tensors.get(stack[0])) is not None:
            return tuple(self._of_stack(whole, need.shape, *stack[1:]))
        return tuple(self._part(official_name(need.path, e), shape) for e in range(experts))

    def _part(self, official: str, shape: tuple[int, ...]) -> Part:
        found = next((self.shards.tensors[name] for name in spellings(official) if name in self.shards.tensors), None)
        if found is None:
            raise ModelFileError(f"tensor {official} {list(shape)} is missing")
        if found.dtype in ("I8", "U8"):
            return self._fp4(found, shape)
        if found.shape != shape and (found.shape, shape) != ((), (1,)):
            raise ModelFileError(f"tensor {found.name} is {found.dtype} {list(found.shape)}, need {list(shape)}")
        codes = self._rows(found, shape)
        if found.dtype == "F8_E4M3":
            return self._fp8(found, shape, codes)
        if found.dtype not in ("F32", "F16", "BF16", "I32", "I64"):
            raise ModelFileError(f"tensor {found.name} is {found.dtype}, need F32, F16, BF16, FP8 or FP4 with scales")
        return Part(found.name, shape, found.dtype, codes, None)

    def _rows(self, found: Stored, shape: tuple[int, ...]) -> np.ndarray:
        rows = shape[0] if len(shape) > 1 else 1
        return self.shards.raw(found).reshape(rows, -1)

    def _fp4(self, found: Stored, shape: tuple[int, ...]) -> Part:
        if len(shape) != 2 or found.shape != (shape[0], shape[1] // 2) or shape[1] % stored.FP4_GROUP:
            raise ModelFileError(f"tensor {found.name} is {found.dtype} {list(found.shape)}, which as FP4 is not "
                                 f"{list(shape)}")
        scale = self._scale(found, (shape[0], shape[1] // stored.FP4_GROUP))
        if scale.dtype not in ("F8_E8M0", "U8"):
            raise ModelFileError(f"tensor {scale.name} is {scale.dtype}, need F8_E8M0 beside FP4")
        return Part(found.name, shape, "FP4", self._rows(found, shape), self._rows(scale, scale.shape))

    def _fp8(self, found: Stored, shape: tuple[int, ...], codes: np.ndarray) -> Part:
        block = stored.FP8_BLOCK
        need = tuple(-(-size // block) for size in shape)
        scale = self._scale(found, need)
        raw = self._rows(scale, need)
        return Part(found.name, shape, "FP8", codes,
                    stored.plain(raw, "F8_E8M0" if scale.dtype == "U8" else scale.dtype).astype(np.float32))

    def _scale(self, found: Stored, shape: tuple[int, ...]) -> Stored:
        stem = found.name.removesuffix(".weight")
        scale = next((self.shards.tensors[stem + end] for end in SCALES if stem + end in self.shards.tensors), None)
        if scale is None or scale.shape != shape or scale.dtype not in ("F8_E8M0", "U8", "F32", "BF16"):
            told = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise ModelFileError(f"the scale of tensor {found.name} is {told}, need F8_E8M0 {list(shape)}")
        return scale

    def _of_stack(self, whole: Stored, shape: tuple[int, ...], first: int, count: int) -> Iterator[Part]:
        """Experts of a tensor that holds all of them: part `first` of `count` along the rows of each."""
        experts, rows, width = shape
        if whole.shape != (experts, count * rows, width) or whole.dtype not in ("F32", "F16", "BF16"):
            raise ModelFileError(f"tensor {whole.name} is {whole.dtype} {list(whole.shape)}, need "
                                 f"{[experts, count * rows, width]} of F32, F16 or BF16")
        codes = self.shards.raw(whole).reshape(experts, count, rows, -1)[:, first]
        for expert in range(experts):
            yield Part(f"{whole.name}[{expert}]", shape[1:], whole.dtype, codes[expert], None)


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as fault:
        raise ModelFileError(f"{path}: {fault.strerror}; give the directory of a whole checkpoint") from None
    except (ValueError, RecursionError) as fault:
        raise ModelFileError(f"{path}: no JSON ({fault}); download it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: no JSON object; download it again")
    return value
