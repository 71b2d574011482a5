"""The decode step: one token of each of some sessions, as one captured graph, run ahead of its caller.

After a token is sampled it is the next step's input before anyone has read it: that step is launched at once, and used
if the caller comes back with the same rows and tokens. Else it is forgotten, which costs nothing but its time: what it
wrote lies in the rings' slack and behind the rows that count.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.models.deepseek_v4 import Model, Step
from ds4mlx.cuda_port.ops.sample import MOST_ROWS
from ds4mlx.cuda_port.session import CudaSession
from ds4mlx.cuda_port.state import Arena
from ds4mlx.cuda_port.transfer import pinned, send
from ds4mlx.engine.protocol import SPAN_TOKENS

STAGES = 4      # host buffers in flight


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step whose logits are there, or will be: sessions with their lengths before it, and the tokens it was fed."""
    sessions: tuple[CudaSession, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    epochs: tuple[int, ...]


class Stepper:
    """Feeds tokens and gives logits f32 [B, V]. Everything happens on the current stream."""

    def __init__(self, model: Model, arena: Arena, context: int) -> None:
        self._model, self._arena = model, arena
        self._pages_each = -(-context // SPAN_TOKENS)
        self.ids = cp.zeros(MOST_ROWS, cp.int32)        # of the next step; sampling writes here
        self._places = cp.zeros((2, MOST_ROWS), cp.int32)
        self._pages = cp.zeros((MOST_ROWS, self._pages_each), cp.int32)
        self._pages_there = np.zeros((MOST_ROWS, self._pages_each), np.int32)
        self._logits = cp.zeros((MOST_ROWS, model.config.vocab_size), cp.float32)
        self._graphs: dict[tuple[int, int, int], tuple[cp.cuda.graph.Graph, list[cp.ndarray]]] = {}
        self._warm: set[tuple[int, int, int]] = set()
        self._staging = [pinned((3, MOST_ROWS), np.int32) for _ in range(STAGES)]
        self._turn = 0
        self._ahead: Ahead | None = None

    def feed(self, sessions: Sequence[CudaSession], tokens: Sequence[int]) -> "cp.ndarray":
        """Logits after each session's token, f32 [B, V]; the sessions' own lists are left to the caller."""
        wanted = Ahead(tuple(sessions), tuple(len(s.tokens) for s in sessions), tuple(tokens),
                       tuple(s.epoch for s in sessions))
        found, self._ahead = self._ahead, None
        if found != wanted:
            self._launch(wanted, tokens)
        return self._logits[:len(sessions)]

    def run_ahead(self, sessions: Sequence[CudaSession]) -> bool:
        """Launch the step that follows, with the tokens in `ids`, for sessions whose lists lack one that was fed.
        Returns whether there was room for it; `know` then tells the tokens."""
        lengths = tuple(len(s.tokens) + 1 for s in sessions)
        if any(length >= s.context for s, length in zip(sessions, lengths, strict=True)):
            return False
        self._launch(Ahead(tuple(sessions), lengths, (), tuple(s.epoch for s in sessions)), None)
        return True

    def know(self, sessions: Sequence[CudaSession], tokens: Sequence[int]) -> None:
        """What the step that was run ahead was fed; the sessions' lists are up to date."""
        self._ahead = Ahead(tuple(sessions), tuple(len(s.tokens) for s in sessions), tuple(tokens),
                            tuple(s.epoch for s in sessions))

    def rehearse(self, rows: int, length: int) -> None:
        """Ask for the kernels of a step of so many sessions, none of which is longer (build.ahead)."""
        self._forward(rows, self._level(length))

    def _launch(self, at: Ahead, tokens: Sequence[int] | None) -> None:
        B = len(at.sessions)
        stage = self._staging[self._turn]
        self._turn = (self._turn + 1) % STAGES
        stage[0, :B] = at.lengths
        stage[1, :B] = [s.slot for s in at.sessions]
        for s, length in zip(at.sessions, at.lengths, strict=True):
            s.require_pages(length + 1)
        send(self._places, stage[:2])
        if tokens is not None:
            stage[2, :B] = tokens
            send(self.ids, stage[2])
        self._send_pages(at.sessions)
        self._run(B, self._level(max(at.lengths) + 1))

    def _send_pages(self, sessions: Sequence[CudaSession]) -> None:
        table = np.zeros_like(self._pages_there[:len(sessions)])
        for i, s in enumerate(sessions):
            table[i, :len(s.pages)] = s.pages[:self._pages_each]
        if not np.array_equal(table, self._pages_there[:len(sessions)]):
            self._pages[:len(sessions)] = cp.asarray(table)
            self._pages_there[:len(sessions)] = table

    def _level(self, length: int) -> int:
        """Bounds of length that graphs are captured for: while no rows are chosen, and then doubling."""
        bound = 4 * (self._model.config.index_topk + 1) - 1
        while bound < length:
            bound = 2 * bound + 1
        return bound

    def _run(self, B: int, bound: int) -> None:
        """The first time plainly, which compiles and allocates; the second time captured; then from the graph."""
        key = B, bound, self._arena.version
        if key in self._graphs:
            self._graphs[key][0].launch()
            return
        if key not in self._warm:
            self._warm.add(key)
            self._forward(B, bound)
            return
        self._graphs = {k: graph for k, graph in self._graphs.items() if k[2] == self._arena.version}
        stream = cp.cuda.get_current_stream()
        stream.begin_capture()
        try:
            self._forward(B, bound)
        finally:
            graph = stream.end_capture()
        self._graphs[key] = graph, scratch.held()
        graph.launch()

    def _forward(self, B: int, bound: int) -> None:
        batch = Step(self.ids[:B], self._places[0, :B], self._places[1, :B], self._pages[:B], bound)
        streams, update = self._model.streams(batch, self._arena)
        self._model.logits(streams, update, self._logits[:B])
