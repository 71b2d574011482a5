"""The MLX engine: opens a model file and turns tokens into tokens. All MLX work stays on the thread that opened it."""
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.config import Settings
from ds4mlx.engine import mlx_memory
from ds4mlx.engine.mlx_session import MLXSession
from ds4mlx.engine.protocol import MemoryPlan, ModelInfo, Row, Step
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import names, schema, weights
from ds4mlx.models.fingerprint import weights_fp
from ds4mlx.models.registry import label
from ds4mlx.ops import native


def open_mlx(settings: Settings, path: Path) -> "MLXEngine":
    """The engine for the GGUF at `path`. Raises ModelFileError before weights are read, DoesNotFit before they are
    allocated."""
    file = GGUF.open(path)
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
        plan = self.plan(context, 1)
        mlx_memory.require(plan, context)
        mlx_memory.reserve(plan)
        self._model = weights.load(file, self._config, settings.kv_round)
        fingerprint = weights_fp(file)
        self.info = ModelInfo(
            name=label(file.metadata, "general.name") or Path(file.path).stem,
            context=self._config.max_position_embeddings, vocab=self._config.vocab_size, quant=_quant(file),
            backend=f"mlx, {_computing(settings.ops)}", fingerprint=fingerprint,
            base=label(file.metadata, "ds4mlx.source_fp") or fingerprint,
            layout=schema.layout_fp(self._config, self._packed), quant_bits=_quant_bits(file))

    def plan(self, context: int, sessions: int) -> MemoryPlan:
        s = self._settings
        return mlx_memory.plan(self._file, self._config, context, sessions, self._packed, s.kv_rewind_points,
                               s.prefill_chunk, self._limit)

    def arrays(self, tokens: int) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return {name: (a.shape, a.dtype) for name, a in schema.arrays(self._config, tokens, self._packed).items()}

    def open(self, context: int) -> MLXSession:
        self._own()
        if not 0 < context <= self._config.max_position_embeddings:
            raise ValueError(f"context of {context} tokens, the model takes 1 to "
                             f"{self._config.max_position_embeddings}")
        return MLXSession(self._model, context, self._settings.kv_rewind_points)

    def prefill(self, session: MLXSession, tokens: Sequence[int]) -> None:
        self._own()
        tokens = list(tokens)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.info.vocab:
            raise ValueError(f"token ids {min(tokens)} to {max(tokens)}, vocabulary has {self.info.vocab}")
        if tokens:
            session.feed(tokens)

    def decode(self, rows: Sequence[Row]) -> list[list[Step]]:
        self._own()
        return [[self._step(row)] for row in rows]

    def _step(self, row: Row) -> Step:
        if row.token is not None:
            row.session.feed([row.token])
        logits = row.session.next_logits()
        s = row.sampling
        adjusted = _adjusted(logits, row)
        how = uniform(s.seed, len(row.generated)), s.temperature, s.top_k, s.min_p, s.top_p
        token = ops.sample(adjusted[None], *(np.array([value]) for value in how))[0]
        logprob, allowed = logits[token] - mx.logsumexp(logits), adjusted[token] > -mx.inf
        mx.eval(token, logprob, allowed)
        if not np.isfinite(logprob.item()):
            raise ArithmeticError("the model gave logits that are not finite; its file or the saved state is damaged")
        if not allowed.item():
            raise ValueError("every token is banned or masked, one at least must be left; loosen the mask")
        return Step(token.item(), logprob.item(), _best(logits, s.top_logprobs))

    def close(self) -> None:
        self._model = None
        self._file.close()

    def _own(self) -> None:
        assert threading.get_ident() == self._thread, "MLX work belongs to the thread that opened the engine"


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of a step: a pure function, so that any engine and any order gives the same."""
    return np.random.Generator(np.random.Philox(key=seed, counter=step)).random()


def _adjusted(logits: mx.array, row: Row) -> mx.array:
    """Bias, then penalties over the generated tokens, then what is forbidden."""
    s = row.sampling
    if s.logit_bias or s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty:
        from mlx_lm.sample_utils import make_logits_processors  # brings transformers: 1.4 s, so only when used
        all_of_it = max(1, len(row.generated))
        for process in make_logits_processors(
                dict(s.logit_bias) or None, s.repetition_penalty if s.repetition_penalty != 1 else None, all_of_it,
                s.presence_penalty or None, all_of_it, s.frequency_penalty or None, all_of_it):
            logits = process(mx.array(row.generated, mx.int32), logits[None] + 0)[0]
    if s.banned:
        logits = mx.put_along_axis(logits, mx.array(sorted(s.banned)), mx.array(-mx.inf), axis=0)
    if row.mask is not None:
        logits = mx.where(mx.array(row.mask), logits, -mx.inf)
    return logits


def _best(logits: mx.array, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens with their log-probabilities, best first."""
    if not count:
        return ()
    order = mx.argsort(-logits)[:count]
    logprobs = logits[order] - mx.logsumexp(logits)
    return tuple(zip(order.tolist(), logprobs.tolist(), strict=True))


def _computing(chosen: str) -> str:
    """What the operations run on, in words."""
    match ops.device() if chosen == "auto" else chosen:
        case "cpu":
            return f"CPU: {native.describe()}"
        case "metal":
            return "Metal kernels"
        case "metal-emulated":
            return "Metal kernels in the emulator"
    return f"plain operations on the {ops.device().upper()}"


def _quant_bits(file: GGUF) -> int:
    """Of most of the routed gate matrices, as a name of checkpoints; 16 where they are not quantised."""
    kinds = Counter(t.kind for n, t in file.tensors.items() if n.endswith("ffn_gate_exps.weight"))
    return {"IQ2_XXS": 2, "Q2_K": 2, "Q4_K": 4, "MXFP4": 4, "Q8_0": 8}.get(kinds.most_common(1)[0][0], 16)


def _quant(file: GGUF) -> str:
    kinds = {part: sorted({t.kind for n, t in file.tensors.items() if n.endswith(f"ffn_{part}_exps.weight")})
             for part in ("gate", "down")}
    return "/".join("+".join(kinds[part]) for part in ("gate", "down"))
