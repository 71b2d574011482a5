"""Rows of lessons from worker processes, in an order that depends on the seed and the number of workers only."""
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from queue import Empty

import numpy as np

WAIT_S = 120
Rows = Iterator[tuple[np.ndarray, np.ndarray]]      # ids u16 [length], loss weights u8 [length] in percent
Batch = tuple[np.ndarray, np.ndarray]               # the same, [rows, length]


class Feed:
    """Batches of one stage and length. Workers run from the start and wait when nobody takes what they made."""

    def __init__(self, make_rows: Callable[[int, int, int], Rows], seed: int, length: int, stage: int, rows: int,
                 workers: int) -> None:
        """`make_rows` is `lessons.rows`. Begin before the GPU is touched: workers are forked."""
        context = multiprocessing.get_context("fork")
        self.queues: list[Queue] = [context.Queue(maxsize=4) for _ in range(workers)]
        self.processes = [
            context.Process(target=_work, args=(make_rows, seed * 1000 + i, length, stage, rows, queue), daemon=True)
            for i, queue in enumerate(self.queues)]
        for process in self.processes:
            process.start()
        self.turn = 0

    def batch(self) -> Batch:
        """The next worker's next batch. Raises RuntimeError where it gives none."""
        queue = self.queues[self.turn % len(self.queues)]
        self.turn += 1
        try:
            return queue.get(timeout=WAIT_S)
        except Empty:
            raise RuntimeError(f"no lessons in {WAIT_S} s; look above for what a worker said") from None

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def _work(make_rows: Callable[[int, int, int], Rows], seed: int, length: int, stage: int, rows: int,
          queue: "Queue") -> None:
    source = make_rows(seed, length, stage)
    while True:
        ids, weights = zip(*(next(source) for _ in range(rows)), strict=True)
        queue.put((np.stack(ids), np.stack(weights)))
