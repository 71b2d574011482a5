"""How far a file is from its checkpoint: one tensor in numbers, or a few rows of all."""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds4mlx.errors import ModelFileError, UsageError
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.names import validate
from ds4mlx.quant.conversion import encode_part, rows_of, slab_rows
from ds4mlx.quant.encode import smoothed
from ds4mlx.quant.plan import Plan, Planned

# Share of a row's energy that a type may lose at most: above what heavy tails cost, far below what another row gives.
MOST_LOSS = {"IQ2_XXS": 0.5, "Q2_K": 0.3, "Q4_K": 0.05, "Q8_0": 1e-3, "MXFP4": 0.05, "F16": 1e-6, "BF16": 2e-5}
MAX_REPORTED = 20
HALF_STEP = 2.0 ** -24   # smallest step of half precision, in which scales and F16 are


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor, encoded as planned."""
    name: str
    kind: str
    weights: int
    mean_square_error: float
    relative_error: float           # root of the share of the energy that is lost
    weighted_relative_error: float  # the same, weighed as the search weighed it
    largest_error: float
    blocks: int
    different_blocks: int | None    # from an existing file; None where there is none, or none of this type


def compare(plan: Plan, name: str, existing: Path | None = None, threads: int | None = None) -> Comparison:
    """Encode one tensor of the plan, and compare it with an existing file. Raises UsageError for an unknown name."""
    tensor = next((t for t in plan.tensors if t.name == name), None)
    if tensor is None:
        near = [t.name for t in plan.tensors if name in t.name][:3]
        raise UsageError(f"--compare-tensor {name[:80]}: no such tensor; its name is that of the file to be, as "
                         f"{', '.join(near) or 'blk.0.ffn_gate_exps.weight'}")
    block, sums, largest, blocks, different = BLOCK_TYPES[tensor.kind], np.zeros(4), 0.0, 0, 0
    theirs = _existing(existing, tensor) if existing is not None and existing.exists() else None
    for expert, start, values, encoded in _encoded(plan, tensor, threads):
        error = dequantize(encoded, tensor.kind) - values
        column = smoothed(plan.importance_of(tensor, expert), values.shape[-1])
        lost, energy = (np.einsum("nk,nk->k", v, v, dtype=np.float64) for v in (error, values))  # of each column
        sums += [lost.sum(), energy.sum(), column @ lost, column @ energy]
        largest, blocks = max(largest, float(np.abs(error).max())), blocks + encoded.size // block.bytes
        if theirs is not None:
            rows = theirs.reshape(len(tensor.parts), -1, encoded.shape[-1])[expert, start:][:len(encoded)]
            different += int((encoded != rows).reshape(-1, block.bytes).any(axis=1).sum())
    lost, energy, weighed_lost, weighed = sums
    count = int(np.prod(tensor.shape, dtype=np.int64))
    return Comparison(name, tensor.kind, count, lost / count, _root(lost, energy), _root(weighed_lost, weighed),
                      largest, blocks, None if theirs is None else different)


def _root(lost: float, energy: float) -> float:
    return float(np.sqrt(lost / energy)) if energy > 0 else 0.0


def _existing(path: Path, tensor: Planned) -> np.ndarray | None:
    with GGUF.open(path) as file:
        info = file.tensors.get(tensor.name)
        same = info is not None and (info.kind, info.shape) == (tensor.kind, tensor.shape)
        return file.raw(tensor.name) if same else None


def _encoded(plan: Plan, tensor: Planned, threads: int | None) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(expert, first row, values [rows, K], blocks [rows, bytes])."""
    for expert, part in enumerate(tensor.parts):
        rows, step = rows_of(part.shape), slab_rows(part.shape[-1])
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values = part.rows(start, stop)
            exact = part.form == "FP4" and tensor.kind == "MXFP4"
            yield expert, start, values, part.mxfp4(start, stop) if exact else encode_part(plan, tensor, expert, values,
                                                                                         threads)


def verify(plan: Plan, out: Path) -> int:
    """Read the file back as an engine does, and compare the first and the last row of every matrix with the checkpoint.

    Returns how many rows were compared. Raises ModelFileError where the file is damaged, or not the plan's.
    """
    with GGUF.open(out) as file:
        validate(file)
        if file.metadata.get("ds4mlx.source_fp") != plan.metadata["ds4mlx.source_fp"]:
            raise ModelFileError(f"{out}: was made from another checkpoint; give its --src, or convert again")
        problems, rows = [], 0
        with file.scattered():
            for tensor in plan.tensors:
                found = file.tensors[tensor.name]
                checked = list(_rows(file, tensor)) if found.kind == tensor.kind else [
                    f"{tensor.name} is {found.kind}, planned was {tensor.kind}"]
                rows += len(checked)
                problems += filter(None, checked)
    if problems:
        raise ModelFileError("\n  ".join([f"{out}: is not what the checkpoint gives; convert again:",
                                          *problems[:MAX_REPORTED]]))
    return rows


def _rows(file: GGUF, tensor: Planned) -> Iterator[str]:
    """What is wrong with each row that is looked at; nothing is an empty text."""
    raw = file.raw(tensor.name)
    raw = raw.reshape(len(tensor.parts), -1, raw.shape[-1])
    for expert, part in enumerate(tensor.parts):
        for row in sorted({0, raw.shape[1] - 1}):
            want = part.rows(row, row + 1).astype(np.float64).reshape(-1)
            got = dequantize(raw[expert, row], tensor.kind)
            lost, energy = np.square(got - want).sum(), np.square(want).sum()
            exact = part.form == "FP4" and tensor.kind == "MXFP4"
            share = 0 if exact else MOST_LOSS.get(tensor.kind, 0)
            fits = lost <= share * energy + (len(want) * HALF_STEP ** 2 if share else 0)
            yield "" if fits else f"row {row} of {part.name} has lost {lost / max(energy, 1e-300):.2g} of its energy"
