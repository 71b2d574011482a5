"""The CUDA engine: opens a model file and turns tokens into tokens, on one card. All its work is on one stream."""
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ds4mlx.config import Settings
from ds4mlx.cuda_port import build, memory, ops, scratch
from ds4mlx.cuda_port.device import cupy as cp, use_stream
from ds4mlx.cuda_port.models.deepseek_v4 import Chunk, Model
from ds4mlx.cuda_port.sampling import Sampler
from ds4mlx.cuda_port.session import CudaSession
from ds4mlx.cuda_port.sizes import Sizes
from ds4mlx.cuda_port.state import Arena
from ds4mlx.cuda_port.step import MOST_ROWS, Stepper
from ds4mlx.cuda_port.weights import loading
from ds4mlx.engine.protocol import SPAN_TOKENS, MemoryPlan, MemoryUse, ModelInfo, Progress, Row, Sampling, Step
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import names, schema
from ds4mlx.models.fingerprint import weights_fp
from ds4mlx.models.registry import label

log = logging.getLogger(__name__)

CHUNKS = 1, 2, 4, 8, 16, 20, 128, 512, 1 << 30  # tokens, of which launches take different forms
ROWS = 1, 2, 4, 8, 16
BITS = {"IQ2_XXS": 2, "Q2_K": 2, "Q4_K": 4, "MXFP4": 4, "Q8_0": 8}


def open_cuda(settings: Settings, path: Path, progress: Progress | None = None) -> "CudaEngine":
    """The engine for the GGUF at `path`. Raises ModelFileError before weights are read, DoesNotFit before they are
    allocated."""
    file = GGUF.open(path)
    try:
        return CudaEngine(file, settings, progress)
    except BaseException:
        file.close()
        raise


class CudaEngine:
    """See engine.protocol.Engine."""

    def __init__(self, file: GGUF, settings: Settings, progress: Progress | None = None) -> None:
        self._file, self._settings, self._thread = file, settings, threading.get_ident()
        self._config, self._packed = names.validate(file), settings.kv_round == "official"
        self._sizes = Sizes.of(self._config, self._packed)
        self._limit = memory.limit_bytes(settings.memory_limit_gb)
        self._context = min(settings.ctx, self._config.max_position_embeddings)
        sessions = settings.batched_session
        plan = self.plan(self._context, sessions)
        memory.require(plan, self._context)
        self._stream = use_stream()
        with loading(file, plan.weights_bytes, progress) as loader:
            self._model = Model(file, self._config, self._sizes, settings.quality, loader)
        pages = sessions * -(-self._context // SPAN_TOKENS)
        self._arena = Arena(self._config, self._sizes, sessions + 1, pages)
        self._stepper = Stepper(self._model, self._arena, self._config.max_position_embeddings)
        self._sampler = Sampler(MOST_ROWS)
        self._rehearse(sessions)
        self._stream.synchronize()
        self.info = self._describe()

    def plan(self, context: int, sessions: int) -> MemoryPlan:
        s = self._settings
        return memory.plan(self._file, self._config, self._sizes, context, sessions, s.kv_rewind_points,
                           s.prefill_chunk, self._limit)

    def memory(self) -> MemoryUse:
        pool = cp.get_default_memory_pool()
        return MemoryUse(pool.used_bytes(), pool.total_bytes())     # a pool keeps what it has once had

    def arrays(self, tokens: int) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {name: (a.shape, a.dtype) for name, a in schema.arrays(self._config, tokens, self._packed).items()}

    def open(self, context: int) -> CudaSession:
        if not 0 < context <= self._config.max_position_embeddings:
            raise ValueError(f"context of {context} tokens, the model takes 1 to "
                             f"{self._config.max_position_embeddings}")
        self._own()
        return CudaSession(self._config, self._arena, context, self._settings.kv_rewind_points, self._packed)

    def prefill(self, session: CudaSession, tokens: Sequence[int]) -> None:
        tokens = list(tokens)
        self._check(session, tokens)
        before = session.here() if session.tokens else None
        try:
            for at in range(0, len(tokens), self._settings.prefill_chunk):
                self._feed(session, tokens[at:at + self._settings.prefill_chunk])
            self._stream.synchronize()
        except BaseException:
            if before is None:
                session.tokens.clear()
            else:
                session.go_to(before)
            raise

    def chunk(self, session: CudaSession, tokens: list[int]) -> Chunk:
        """The next tokens of a session, which has the pages for them."""
        start, end = len(session.tokens), len(session.tokens) + len(tokens)
        places = np.array([*session.pages, session.slot], np.int32)
        numbers = np.concatenate([np.array(tokens, np.int32), np.arange(start, end, dtype=np.int32), places])
        ends = np.cumsum([len(tokens), len(tokens), len(session.pages)]).tolist()
        ids, positions, pages, slot = cp.split(cp.asarray(numbers), ends)
        return Chunk(ids, positions, slot, pages, start, session.slot)

    def _feed(self, session: CudaSession, tokens: list[int]) -> None:
        session.require_pages(len(session.tokens) + len(tokens))
        streams, update = self._model.streams(self.chunk(session, tokens), self._arena)
        self._model.logits(streams[-1:], update.last(), session.next_side()[None])
        session.turn()
        session.tokens.extend(tokens)

    def decode(self, rows: Sequence[Row]) -> list[list[Step]]:
        for row in rows:
            self._check(row.session, [] if row.token is None else [row.token])
        fed = [row.session for row in rows if row.token is not None]
        if len({id(session) for session in fed}) < len(fed):
            raise ValueError("a session is there twice, and takes one token in a step")
        return [step for at in range(0, len(rows), MOST_ROWS) for step in self._step(rows[at:at + MOST_ROWS])]

    def _step(self, rows: Sequence[Row]) -> list[list[Step]]:
        fed = [row for row in rows if row.token is not None]
        sessions = [row.session for row in fed]
        if fed:
            logits = self._stepper.feed(sessions, [row.token for row in fed])
            ops.keep(logits, [session.next_side() for session in sessions])
        sides = [row.session.next_logits() if row.token is None else row.session.next_side() for row in rows]
        if len(fed) < len(rows):
            logits = cp.stack(sides)
        choice = self._sampler.choose(rows, logits, self._stepper.ids)
        ahead = len(fed) == len(rows) and self._stepper.run_ahead(sessions)
        steps = choice.steps(sides)     # waits, and raises before any session has advanced
        for row in fed:
            row.session.turn()
            row.session.tokens.append(row.token)
        if ahead:
            self._stepper.know(sessions, [step.token for step in steps])
        return [[step] for step in steps]

    def close(self) -> None:
        if self._model is not None:
            self._stream.synchronize()
        self._model = self._stepper = self._arena = self._sampler = None
        scratch.clear()
        cp.get_default_memory_pool().free_all_blocks()
        self._file.close()

    def _rehearse(self, sessions: int) -> None:
        """Chunks and steps at the beginning and the end of a context, as far as it takes to know their kernels."""
        began, session = time.perf_counter(), self.open(self._context)
        with build.ahead() as kernels, self._model.fewer_layers():
            for count in sorted({min(n, self._settings.prefill_chunk, self._context) for n in CHUNKS}):
                for start in {0, self._context - count}:
                    session.tokens[:] = [0] * start
                    self._feed(session, [0] * count)
            for rows in sorted({min(n, sessions) for n in ROWS}):
                for length in (1, 8 * self._config.index_topk, self._context):
                    self._stepper.rehearse(rows, length)
            self._sampler.choose([Row(session, Sampling())], session.next_logits()[None], self._stepper.ids)
        session.close()
        log.info("%d kernels compiled in %.1f s", len(kernels), time.perf_counter() - began)

    def _check(self, session: CudaSession, tokens: list[int]) -> None:
        self._own()
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.info.vocab:
            raise ValueError(f"token ids {min(tokens)} to {max(tokens)}, vocabulary has {self.info.vocab}")
        if len(session.tokens) + len(tokens) > session.context:
            raise ValueError(f"{len(session.tokens)} + {len(tokens)} tokens, context is {session.context}")

    def _own(self) -> None:
        assert threading.get_ident() == self._thread, "the card's work belongs to the thread that opened the engine"

    def _describe(self) -> ModelInfo:
        file, fingerprint = self._file, weights_fp(self._file)
        card = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()
        kinds = {part: Counter(t.kind for n, t in file.tensors.items() if n.endswith(f"ffn_{part}_exps.weight"))
                 for part in ("gate", "down")}
        return ModelInfo(
            name=label(file.metadata, "general.name") or Path(file.path).stem,
            context=self._config.max_position_embeddings, vocab=self._config.vocab_size,
            quant="/".join("+".join(sorted(kinds[part])) for part in ("gate", "down")), backend=f"cuda, {card}",
            fingerprint=fingerprint, base=label(file.metadata, "ds4mlx.source_fp") or fingerprint,
            layout=schema.layout_fp(self._config, self._packed),
            quant_bits=BITS.get(kinds["gate"].most_common(1)[0][0], 16))
