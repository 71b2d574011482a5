"""A model file to the card: read by several threads into a few pinned buffers, copied while the next ones fill."""
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.transfer import pinned
from ds4mlx.engine.protocol import Progress
from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20      # host memory: PIECES of these, whatever the model's size
PIECES = 8
READERS = 4
LOG_SECONDS = 2.0


class Loader:
    """Copies tensors of a file to the card. Those that share their bytes in the file share them there."""

    def __init__(self, file: GGUF, total_bytes: int, progress: Progress | None) -> None:
        self._file, self._descriptor = file, os.open(file.path, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(READERS)
        self._buffers = [pinned((PIECE_BYTES,), np.uint8) for _ in range(PIECES)]
        self._ready: list[cp.cuda.Event | None] = [None] * PIECES
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._loaded: dict[int, cp.ndarray] = {}
        self.progress = progress or _log_progress()
        self._done, self._total = 0, total_bytes

    def raw(self, name: str) -> "cp.ndarray":
        """u8 [*shape[:-1], row bytes], on the card after `wait`."""
        info, blocks = self._file.tensors[name], self._file.raw(name)
        if info.offset not in self._loaded:
            target = cp.empty(info.nbytes, cp.uint8)
            self._copy(target, info.offset)
            self._loaded[info.offset] = target
        return self._loaded[info.offset].reshape(blocks.shape)

    def _copy(self, target: "cp.ndarray", offset: int) -> None:
        starts = range(0, target.size, PIECE_BYTES)
        waiting: list[tuple[int, int, Future[None]]] = []
        for i, start in enumerate(starts):
            size = min(PIECE_BYTES, target.size - start)
            waiting.append((start, size, self._pool.submit(self._read, i % PIECES, offset + start, size)))
            if len(waiting) == PIECES or start == starts[-1]:
                self._send(target, waiting)
                waiting = []

    def _read(self, buffer: int, offset: int, size: int) -> None:
        if self._ready[buffer] is not None:
            self._ready[buffer].synchronize()
        view, at = memoryview(self._buffers[buffer])[:size], 0
        while at < size:
            count = os.preadv(self._descriptor, [view[at:]], offset + at)
            if count <= 0:
                raise ModelFileError(f"{self._file.path}: ends at byte {offset + at} while it is read; it is being "
                                     "changed, start again when it is whole")
            at += count

    def _send(self, target: "cp.ndarray", waiting: list[tuple[int, int, Future[None]]]) -> None:
        for i, (start, size, read) in enumerate(waiting):
            read.result()
            target[start:start + size].data.copy_from_host_async(self._buffers[i].ctypes.data, size, self._stream)
            self._ready[i] = self._stream.record()
            self._done += size
            self.progress(min(self._done, self._total - 1), self._total)   # the last word is said in `loading`

    def wait(self) -> None:
        """Until what was asked for is on the card."""
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._pool.shutdown()
        os.close(self._descriptor)


def _log_progress() -> Progress:
    """A line every LOG_SECONDS and one at the end."""
    began = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < LOG_SECONDS:
            return
        last = now
        log.info("weights: %.1f of %.1f GB on the card, %.1f GB/s", done / 1e9, total / 1e9,
                 done / 1e9 / max(now - began, 1e-3))

    return report


@contextmanager
def loading(file: GGUF, total_bytes: int, progress: Progress | None = None) -> Iterator[Loader]:
    """Whoever shows `progress` hears at last that all is there, after an error too: it has a bar to take away."""
    loader, complete = Loader(file, total_bytes, progress), False
    try:
        yield loader
        complete = True
    finally:
        loader.close()
        if complete or progress:    # what is no matrix has not been counted
            loader.progress(total_bytes, total_bytes)
