"""The decode step as a graph that is traced once and run with other numbers: a card would wait for the host else.

Whatever changes from step to step comes in as arrays: tokens, positions, rotary tables, page tables, the places of new
rows. What only grows, how many rows a token may see, is a bound that doubles, and each bound has a graph of its own.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.graph import Model
from ds4mlx.models.deepseek_v4.layers import Batch
from ds4mlx.models.deepseek_v4.pages import PAGE_TOKENS, Pool, page_count
from ds4mlx.models.deepseek_v4.stacked import StackedCompressor, StackedLayer

# Tokens of chunks: products of a few are compiled for up to 1, 2, 4 …; more are shared out to experts in tiles of three
# sizes, and the longest choose rows.
CHUNKS = 1, 2, 4, 8, 16, 250, 600, 2300

Arrays = list[mx.array]


@dataclass(frozen=True, slots=True)
class Form:
    """What a graph is traced for: tokens that a sequence may have, and the ratios of which a row is completed."""
    bound: int
    written: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, config: Config) -> "Form":
        bound = 4 * (config.index_topk + 1) - 1      # up to here no rows are chosen
        while bound <= int(batch.positions.max()):
            bound = max(2 * bound // PAGE_TOKENS, 1) * PAGE_TOKENS      # scores of whole pages need not be cut, a copy
        written = tuple(ratio for ratio in ratios(config) if batch.places(ratio) is not None)
        return cls(bound, written)


def ratios(config: Config) -> list[int]:
    """Those that layers are compressed by."""
    return sorted({ratio for ratio in config.compress_ratios if ratio})


def numbers(batch: Batch, form: Form) -> Arrays:
    """Of a step: ids i32 [B]; i32 [1 + written, B], positions and places; pages i32 [B, P]; rotary tables f32
    [2 + ratios, 2, B, pairs], of layers without and with compression and of groups."""
    config, at = batch.config, batch.positions
    plain, compressed = (rope.frequencies(config, which) for which in (False, True))
    tables = [rope.tables(at, plain), rope.tables(at, compressed),
              *(rope.tables(at // ratio * ratio, compressed) for ratio in ratios(config))]
    places = np.stack([batch.positions.astype(np.int32), *(batch.places(ratio) for ratio in form.written)])
    pages = np.zeros((batch.size, page_count(form.bound)), np.int32)
    held = batch.pages[:, :pages.shape[1]]
    pages[:, :held.shape[1]] = held
    return [batch.ids, mx.array(places), mx.array(pages), mx.array(np.array(tables))]


def traced_batch(config: Config, form: Form, ids: mx.array, places: mx.array, pages: mx.array,
                 tables: mx.array) -> Batch:
    """A step's tokens while a graph is traced: `numbers` in place of what the host knows."""
    B, kinds = ids.shape[0], ratios(config)
    # Split once: an index would gather, a launch for each layer.
    turns = mx.split(tables.reshape(-1, tables.shape[-1]), 2 * tables.shape[0])
    plain, compressed, *groups = zip(turns[::2], turns[1::2], strict=True)
    at, *new = mx.split(places.reshape(-1), places.shape[0]) if len(places) > 1 else [places.reshape(B)]
    written = dict(zip(form.written, new, strict=True))
    batch = Batch(config, ids, np.full(B, form.bound - 1), np.zeros(pages.shape, np.int32),
                  dict(zip(kinds, groups, strict=True)), {ratio: written.get(ratio) for ratio in kinds})
    # What it would compute of positions and pages, and keep, when first asked.
    batch.__dict__.update(_plain=plain, _compressed=compressed, at=at, _page_tables=pages)
    return batch


class TracedStep:
    """`Model.step`, traced. Get it from `traceable`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._runs: dict[Form, Callable[[Arrays, Arrays, Arrays], tuple[mx.array, Arrays, Arrays]]] = {}

    def __call__(self, batch: Batch, layers: Sequence[StackedLayer]) -> mx.array:
        """Logits f32 [B, V]; the layers take in the tokens."""
        form = Form.of(batch, self._model.config)
        step, rings = numbers(batch, form), [a for layer in layers for a in layer.rings()]
        pools = [c.pool for layer in layers for c in layer.compressors()]
        if form not in self._runs:
            with ops.prepared():
                self._run(form, step, rings, [mx.zeros(pool.rows.shape, pool.rows.dtype) for pool in pools])
            self._runs[form] = mx.compile(partial(self._run, form))
        logits, rings, rows = self._runs[form](step, rings, [pool.rows for pool in pools])
        of_layer, of_pool = iter(rings), iter(rows)
        for layer in layers:
            layer.windows = next(of_layer)
            for c in layer.compressors():
                c.frontiers = next(of_layer)
        for pool in pools:
            if pool.ratio in form.written:
                pool.rows = next(of_pool)
        return logits

    def _run(self, form: Form, step: Arrays, rings: Arrays, rows: Arrays) -> tuple[mx.array, Arrays, Arrays]:
        config = self._model.config
        layers = _layers(config, rings, rows)
        logits = self._model.step(traced_batch(config, form, *step), layers)
        pools = [c.pool for layer in layers for c in layer.compressors()]
        return (logits, [a for layer in layers for a in layer.rings()],
                [pool.rows for pool in pools if pool.ratio in form.written])


def traceable(model: Model) -> Callable[[Batch, Sequence[StackedLayer]], mx.array]:
    """`model.step`, traced where it pays and can be: on CUDA, with experts that are chosen without the host."""
    stacks = [w for layer in model.layers for w in (layer.ffn.experts_w1, layer.ffn.experts_w2, layer.ffn.experts_w3)]
    return TracedStep(model) if all(w.arranged for w in stacks) else lambda batch, layers: model.step(batch, layers)


def prepare(model: Model) -> None:
    """Compile what chunks of some sizes launch, all at once: one by one, the first prompt would wait for each."""
    if isinstance(traceable(model), TracedStep):
        with ops.prepared():
            for tokens in CHUNKS:
                streams, update = model.chunk(mx.zeros(tokens, mx.int32), model.make_cache())
                model.logits(streams[-1:], update.rows(slice(-1, None)))


def _layers(config: Config, rings: Arrays, rows: Arrays) -> list[StackedLayer]:
    """The layers whose arrays `TracedStep` took apart."""
    next_ring, next_rows, layers = iter(rings), iter(rows), []
    for ratio in config.compress_ratios[:config.num_hidden_layers]:
        windows, parts = next(next_ring), []
        for _ in range(2 if ratio == 4 else 1 if ratio else 0):
            pool = Pool.of_rows(ratio, next(next_rows))
            parts.append(StackedCompressor(next(next_ring), pool))
        layers.append(StackedLayer(windows, *parts, *[None] * (2 - len(parts))))
    return layers
