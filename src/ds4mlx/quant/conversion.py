"""The conversion itself: tensor by tensor from the checkpoint to OUT.partial, which becomes OUT when it is whole.

Beside OUT.partial lies OUT.partial.done: the digest of its header, then the name of every tensor whose bytes have
reached the disk. A conversion that was stopped, by whatever, goes on after the last of them.
"""
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ds4mlx.errors import ModelFileError
from ds4mlx.quant.encode import encode
from ds4mlx.quant.plan import Plan, Planned

SLAB_WEIGHTS = 1 << 25  # in memory at a time, and as many read ahead: 128 MiB of float32, with all copies 1 GB
Progress = Callable[[Planned, int], None]   # the tensor, and how many bytes of it were written just now


@dataclass(frozen=True, slots=True)
class _Slab:
    """Rows of one part, ready to be encoded. `blocks` where they are in the file's type already."""
    expert: int
    values: np.ndarray | None
    blocks: np.ndarray | None


def convert(plan: Plan, out: Path, *, resume: bool = False, overwrite: bool = False, threads: int | None = None,
            progress: Progress = lambda tensor, nbytes: None) -> None:
    """Write `out`. Raises ModelFileError where files are in the way, room is lacking, or the checkpoint is damaged.

    What is there of a conversion that was stopped is gone on with if `resume`, written anew if `overwrite`.
    """
    partial, journal = _partial(out), _journal(out)
    done = _begin(plan, out, resume, overwrite)
    try:
        with open(partial, "r+b" if done is not None else "wb") as file, open(journal, "a", encoding="utf-8") as log:
            if done is None:
                file.write(plan.layout.header)
                log.write(_digest(plan) + "\n")
            for tensor, offset in zip(plan.tensors, plan.layout.offsets, strict=True):
                if done is not None and tensor.name in done:
                    progress(tensor, tensor.nbytes)
                    continue
                file.seek(offset)
                for nbytes in _write(plan, tensor, file, threads):
                    progress(tensor, nbytes)
                _to_disk(file)
                log.write(f"{tensor.name}\n")
                _to_disk(log)
            file.truncate(plan.layout.nbytes)
            _to_disk(file)
        os.replace(partial, out)
        journal.unlink()
    except OSError as fault:
        told = "the disk is full" if fault.errno in (errno.ENOSPC, errno.EDQUOT) else fault.strerror
        raise ModelFileError(f"{partial}: {told}; what is written stays: see to it and go on with --resume") from fault


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _journal(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial.done")


def _digest(plan: Plan) -> str:
    return hashlib.sha256(plan.layout.header).hexdigest()


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _begin(plan: Plan, out: Path, resume: bool, overwrite: bool) -> frozenset[str] | None:
    """The tensors that are there already, or None to begin anew."""
    partial, journal = _partial(out), _journal(out)
    if out.exists() and not overwrite:
        raise ModelFileError(f"{out}: is there already; give --overwrite to replace it, or another --out")
    there = partial.exists()
    if there and not resume and not overwrite:
        raise ModelFileError(f"{partial}: a conversion was stopped here; give --resume to go on with it, or "
                             "--overwrite to begin anew")
    if not out.absolute().parent.is_dir():
        raise ModelFileError(f"{out}: its directory does not exist; make it, or give another --out")
    done = _resumed(plan, partial, journal) if resume and there else None
    if done is None:
        journal.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
    _require_room(plan, out, partial.stat().st_size if done is not None else 0)
    return done


def _resumed(plan: Plan, partial: Path, journal: Path) -> frozenset[str] | None:
    """What the stopped conversion has done, or None if it had not come far enough to count."""
    try:
        digest, *names = journal.read_text("utf-8").split("\n")[:-1]  # a line without its end was being written
    except (OSError, ValueError):
        return None
    if digest != _digest(plan):
        raise ModelFileError(f"{partial}: was begun with another checkpoint, recipe or imatrix; give the same again, "
                             "or --overwrite to begin anew")
    with open(partial, "rb") as file:
        if file.read(len(plan.layout.header)) != plan.layout.header:
            return None
    ends = {t.name: at + t.nbytes for t, at in zip(plan.tensors, plan.layout.offsets, strict=True)}
    size = partial.stat().st_size
    return frozenset(name for name in names if ends.get(name, size + 1) <= size)


def _require_room(plan: Plan, out: Path, there: int) -> None:
    free, need = shutil.disk_usage(out.absolute().parent).free, plan.layout.nbytes - there
    if free < need:
        raise ModelFileError(f"{out}: needs {need / 1e9:.3f} GB, its disk has {free / 1e9:.3f} GB free; make room, or "
                             "give another --out")


def _write(plan: Plan, tensor: Planned, file: BinaryIO, threads: int | None) -> Iterator[int]:
    """Write one tensor; how many bytes went out with each slab. The next slab is read while one is encoded."""
    with ThreadPoolExecutor(1, thread_name_prefix="ds4mlx-read") as reader:
        places = [(expert, start) for expert, part in enumerate(tensor.parts)
                  for start in range(0, rows_of(part.shape), slab_rows(part.shape[-1]))]
        ahead: Future[_Slab] = reader.submit(_read, tensor, *places[0])
        for following in [*places[1:], None]:
            slab = ahead.result()
            if following is not None:
                ahead = reader.submit(_read, tensor, *following)
            blocks = slab.blocks if slab.blocks is not None else encode_part(plan, tensor, slab.expert, slab.values,
                                                                             threads)
            file.write(np.ascontiguousarray(blocks))
            yield blocks.nbytes


def encode_part(plan: Plan, tensor: Planned, expert: int, values: np.ndarray, threads: int | None = None) -> np.ndarray:
    """Rows of one part as blocks of the tensor's type. Raises ModelFileError for weights that it cannot hold.

    Without an imatrix the columns of IQ2_XXS count as the energy of their weights.
    """
    importance = plan.importance_of(tensor, expert)
    if importance is None and tensor.kind == "IQ2_XXS":
        importance = np.square(values).mean(axis=0)
    try:
        return encode(values, tensor.kind, importance, threads=threads)
    except ValueError as fault:
        name = tensor.parts[expert].name
        raise ModelFileError(f"tensor {name}: {fault}; choose another type for {tensor.name}") from None


def rows_of(shape: tuple[int, ...]) -> int:
    """A vector is one row."""
    return shape[0] if len(shape) > 1 else 1


def slab_rows(width: int) -> int:
    """Rows of a part that are encoded together."""
    return max(1, SLAB_WEIGHTS // width)


def _read(tensor: Planned, expert: int, start: int) -> _Slab:
    part = tensor.parts[expert]
    stop = min(start + slab_rows(part.shape[-1]), rows_of(part.shape))
    if part.form == "FP4" and tensor.kind == "MXFP4":
        return _Slab(expert, None, part.mxfp4(start, stop))
    return _Slab(expert, part.rows(start, stop), None)
