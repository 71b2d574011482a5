"""The MLX engine: opens a model file and turns tokens into tokens. All MLX work stays on the thread that opened it."""
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.config import Settings, suggest
from ds4mlx.engine import mlx_memory, mlx_taps
from ds4mlx.engine.mlx_decode import Decoder
from ds4mlx.engine.mlx_session import MLXSession
from ds4mlx.engine.protocol import MemoryPlan, MemoryUse, ModelInfo, Row, Step
from ds4mlx.engine.taps import Taps
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import names, schema, traced, weights
from ds4mlx.models.deepseek_v4.directions import Steering, read_steering
from ds4mlx.models.deepseek_v4.state import Pools
from ds4mlx.models.fingerprint import weights_fp
from ds4mlx.models.registry import label
from ds4mlx.ops import cuda_kernel, native


def open_mlx(settings: Settings, path: Path) -> "MLXEngine":
    """The engine for the GGUF at `path`. Raises ModelFileError before weights are read, DoesNotFit before they are
    allocated."""
    file = GGUF.open(path)
    if ops.device() == "cuda":
        suggest(cuda_kernel.GRAPHS | (cuda_kernel.EXACT if settings.quality else {}))
    ops.use(settings.ops, settings.quality)
    try:
        return MLXEngine(file, settings)
    except BaseException:
        file.close()
        raise


class MLXEngine:
    """See engine.protocol.Engine."""

    def __init__(self, file: GGUF, settings: Settings) -> None:
        self._file, self._settings, self._thread = file, settings, threading.get_ident()
        self._config, self._packed = names.validate(file), settings.kv_round == "official"
        self._limit = mlx_memory.limit_bytes(settings.memory_limit_gb)
        context = min(settings.ctx, self._config.max_position_embeddings)
        plan = self.plan(context, settings.batched_session)
        mlx_memory.require(plan, context, self.plan)
        mlx_memory.reserve(plan)
        if settings.warm_weights:
            file.warm()
        self._model = weights.load(file, self._config, settings.kv_round)
        traced.prepare(self._model)
        self._pools = Pools(self._config, settings.kv_round)
        self._sessions: weakref.WeakSet[MLXSession] = weakref.WeakSet()
        self._later = _computes_later(settings.ops)
        self._decoder = Decoder(self._model, self._pools, lookahead=self._later)
        steering = read_steering(settings, self._config)
        self.steer(steering)
        fingerprint = _steered_fp(weights_fp(file), steering)
        self.info = ModelInfo(
            name=label(file.metadata, "general.name") or Path(file.path).stem,
            context=self._config.max_position_embeddings, vocab=self._config.vocab_size, quant=_quant(file),
            backend=f"mlx, {_computing(settings.ops)}", fingerprint=fingerprint,
            base=_steered_fp(label(file.metadata, "ds4mlx.source_fp"), steering) or fingerprint,
            layout=schema.layout_fp(self._config, self._packed), quant_bits=_quant_bits(file))

    def plan(self, context: int, sessions: int) -> MemoryPlan:
        s = self._settings
        return mlx_memory.plan(self._file, self._config, context, sessions, self._packed, s.kv_rewind_points,
                               s.prefill_chunk, self._limit)

    def memory(self) -> MemoryUse:
        return MemoryUse(mx.get_active_memory(), mx.get_peak_memory())

    def arrays(self, tokens: int) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {name: (a.shape, a.dtype) for name, a in schema.arrays(self._config, tokens, self._packed).items()}

    def open(self, context: int) -> MLXSession:
        self._own()
        if not 0 < context <= self._config.max_position_embeddings:
            raise ValueError(f"context of {context} tokens, the model takes 1 to "
                             f"{self._config.max_position_embeddings}")
        others = [self.plan(session.context, 1).session_bytes for session in self._sessions if not session.closed]
        mlx_memory.require_one_more(self.plan(context, 1 + len(others)), sum(others))
        session = MLXSession(self._model, context, self._settings.kv_rewind_points, self._pools, self._sessions,
                             early=self._later)
        self._sessions.add(session)
        return session

    def prefill(self, session: MLXSession, tokens: Sequence[int]) -> None:
        self._own()
        tokens = list(tokens)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.info.vocab:
            raise ValueError(f"token ids {min(tokens)} to {max(tokens)}, vocabulary has {self.info.vocab}")
        session.require_of(self._pools.pages)
        if tokens:
            session.feed(tokens)

    def decode(self, rows: Sequence[Row]) -> list[list[Step]]:
        self._own()
        return [[step] for step in self._decoder.decode(rows)]

    def watch(self, session: MLXSession, tokens: Sequence[int], layers: Collection[int]) -> Taps:
        """See engine.taps.Watcher."""
        start, tokens = len(session.tokens), list(tokens)
        with mlx_taps.watching(self._model, layers) as watch:
            self.prefill(session, tokens)
        return watch.taps(self._model, tokens, start)

    def lens(self, streams: np.ndarray) -> np.ndarray:
        """See engine.taps.Watcher."""
        self._own()
        return np.array(self._model.logits(mx.array(streams), None))

    def steer(self, steering: Steering | None) -> None:
        """All sessions, from their next token on. `info` does not tell of it."""
        self._own()
        self._model.steer(steering)
        self._decoder.forget()

    @property
    def lookahead(self) -> bool:
        """Whether a step is begun before the tokens that it feeds are read. It changes no token."""
        return self._decoder.lookahead

    @lookahead.setter
    def lookahead(self, on: bool) -> None:
        self._decoder.lookahead = on

    def close(self) -> None:
        self._model = self._pools = self._decoder = None
        self._file.close()

    def _own(self) -> None:
        assert threading.get_ident() == self._thread, "MLX work belongs to the thread that opened the engine"


def _steered_fp(fingerprint: str, steering: Steering | None) -> str:
    return steering.marked(fingerprint) if steering and fingerprint else fingerprint


def _computes_later(chosen: str) -> bool:
    """Whether operations only queue their work: on the CPU ours compute at once, and begun ahead they would be waited
    for."""
    return (ops.device() if chosen == "auto" else chosen) in ("metal", "cuda")


def _computing(chosen: str) -> str:
    """What the operations run on, in words."""
    match ops.device() if chosen == "auto" else chosen:
        case "cpu":
            return f"CPU: {native.describe()}"
        case "metal":
            return "Metal kernels"
        case "metal-emulated":
            return "Metal kernels in the emulator"
        case "cuda":
            return "CUDA kernels"
    return f"plain operations on the {ops.device().upper()}"


def _quant_bits(file: GGUF) -> int:
    """Of most of the routed gate matrices, as a name of checkpoints; 16 where they are not quantised."""
    kinds = Counter(t.kind for n, t in file.tensors.items() if n.endswith("ffn_gate_exps.weight"))
    return {"IQ2_XXS": 2, "Q2_K": 2, "Q4_K": 4, "MXFP4": 4, "Q8_0": 8}.get(kinds.most_common(1)[0][0], 16)


def _quant(file: GGUF) -> str:
    kinds = {part: sorted({t.kind for n, t in file.tensors.items() if n.endswith(f"ffn_{part}_exps.weight")})
             for part in ("gate", "down")}
    return "/".join("+".join(kinds[part]) for part in ("gate", "down"))
