"""DeepSeek V4 in the paper's order, as launches on the card: embed -> layers -> head.

Two forms share every line but a few: a chunk, consecutive tokens of one session, and a step, one token of each of some
sessions. Nothing here waits for the card, and a step reads its positions there, so that it can be captured.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port import ops, scratch
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.models import layers as parts
from ds4mlx.cuda_port.models.layers import Layer
from ds4mlx.cuda_port.sizes import Sizes
from ds4mlx.cuda_port.state import Arena
from ds4mlx.cuda_port.weights import Loader
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import rope
from ds4mlx.models.deepseek_v4.config import Config


@dataclass(frozen=True, slots=True)
class Chunk:
    """T consecutive tokens of one session: ids, positions i32 [T], slots i32 [1], pages i32 [P]."""
    ids: "cp.ndarray"
    positions: "cp.ndarray"
    slots: "cp.ndarray"
    pages: "cp.ndarray"
    start: int
    slot: int       # the same as slots, on the host

    @property
    def bound(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Step:
    """A token of each of B sessions: ids, positions, slots i32 [B], pages i32 [B, P]. bound: no position reaches it."""
    ids: "cp.ndarray"
    positions: "cp.ndarray"
    slots: "cp.ndarray"
    pages: "cp.ndarray"
    bound: int


Batch = Chunk | Step


class Model:
    """Weights on the card, and the launches that turn tokens into logits; states are the arena's."""

    def __init__(self, file: GGUF, config: Config, sizes: Sizes, exact: bool, loader: Loader) -> None:
        self.config, self.sizes, self.exact = config, sizes, exact
        found = parts.tensors(file, config, loader)
        self.embed, self.head = found["embed"], found["head"]
        self.hc_head = parts.head(found, config)
        self._layers = list(enumerate(parts.layers(found, config)))
        self._frequencies = cp.asarray(np.stack([rope.frequencies(config, compressed) for compressed in (False, True)]))

    @contextmanager
    def fewer_layers(self) -> Iterator[None]:
        """In here, of layers that launch the same kernels the first alone (build.ahead)."""
        every = self._layers
        self._layers = list({layer.form: (i, layer) for i, layer in reversed(every)}.values())
        try:
            yield
        finally:
            self._layers = every

    def streams(self, batch: Batch, arena: Arena) -> tuple["cp.ndarray", ops.Update]:
        """Through all layers: the final streams [T, N, D] and the update that they still lack. The state in the arena
        takes in the tokens; their pages must be there."""
        c, T = self.config, len(batch.ids)
        tables = scratch.take("tables", (4, 2, T, self.sizes.pairs))
        streams = scratch.take("streams", (T, c.hc_mult, c.hidden_size))
        x = scratch.take("x", (T, c.hidden_size))
        update = ops.Update(scratch.take("y", (T, c.hidden_size)), scratch.take("post", (T, c.hc_mult)),
                            scratch.take("m", (T, c.hc_mult, c.hc_mult)),
                            scratch.take("sums", (T, 2 * c.hc_mult * (1 + c.hc_mult))))
        step = isinstance(batch, Step)
        ops.tables(batch.positions, self._frequencies, tables)
        ops.embed(self.embed, batch.ids, streams)
        for i, layer in self._layers:
            ops.hyper_mix(streams, layer.hc_attn, update, i == 0, x, step)
            self._attention(i, layer, x, tables, batch, arena, update)
            ops.hyper_mix(streams, layer.hc_ffn, update, False, x, step)
            self._experts(layer, x, batch.ids, update, step)
        return streams, update

    def logits(self, streams: "cp.ndarray", update: ops.Update, out: "cp.ndarray") -> None:
        """What `streams` gave, or rows of it, to out f32 [T, V]; once, for the streams take in the update."""
        x = scratch.take("head.x", (len(streams), self.config.hidden_size))
        ops.hyper_mix(streams, self.hc_head, update, False, x, step=len(streams) <= 16)
        ops.dense(x, [self.head], [out], quality=self.exact)

    def _attention(self, i: int, layer: Layer, x: "cp.ndarray", tables: "cp.ndarray", batch: Batch, arena: Arena,
                   update: ops.Update) -> None:
        c, s, T, ratio = self.config, self.sizes, len(x), layer.ratio
        choose = ratio == 4 and batch.bound // 4 > c.index_topk     # else every visible row is attended
        latent, qr, q = (scratch.take(name, (T, n)) for name, n in (
            ("latent", c.q_lora_rank), ("qr", c.q_lora_rank), ("q", c.num_attention_heads * c.head_dim)))
        kv, weight = scratch.take("kv", (T, c.head_dim)), scratch.take("index.weight", (T, c.index_n_heads))
        products = [tuple(scratch.take(f"compressor.{j}.{part}", (T, w.wkv.shape[0])) for part in "ks")
                    for j, w in enumerate(layer.compressors)]
        ops.dense(x, [layer.wq_a, layer.wkv, *(m for w in layer.compressors for m in (w.wkv, w.wgate)),
                      *([layer.index_weights_proj] if choose else [])],
                  [latent, kv, *(a for pair in products for a in pair), *([weight] if choose else [])],
                  quality=self.exact)
        fresh = self._take_in(i, layer, latent, kv, products, tables, batch, arena, qr)
        index_q = scratch.take("index.q", (T, c.index_n_heads * c.index_head_dim))
        ops.dense(qr, [layer.wq_b, *([layer.index_wq_b] if choose else [])], [q, *([index_q] if choose else [])],
                  quality=self.exact)
        kind, chosen = tables[1 if ratio else 0], None
        if choose:
            chosen = scratch.take("chosen", (T, c.index_topk), np.int32)
            ops.choose_rows(index_q, weight, kind, arena.pools[i][1], batch.pages, batch.positions, batch.bound // 4,
                            chosen, s)
        rows = ops.Rows(arena.window(i), arena.layout.slot_bytes, batch.slots, fresh,
                        arena.pools[i][0] if ratio else None, batch.pages if ratio else None, chosen,
                        batch.bound // ratio if ratio else 0)
        o = scratch.take("o", (T, c.num_attention_heads * c.head_dim))
        back = ops.WayBack(layer.hc_attn, update) if isinstance(batch, Step) else None
        ops.attend(q, kind, rows, batch.positions, layer.attn_sink, ratio, s, c.rms_norm_eps, self.exact, o, back)
        if isinstance(batch, Chunk):
            ops.keep_rows(fresh, arena.window(i)[batch.slot], batch.start, s)
        low = scratch.take("low", (T, c.o_groups * c.o_lora_rank))
        ops.dense(o, [layer.wo_a], [low], groups=c.o_groups, quality=self.exact)
        ops.dense(low, [layer.wo_b], [update.y], quality=self.exact)

    def _take_in(self, i: int, layer: Layer, latent: "cp.ndarray", kv: "cp.ndarray",
                 products: "list[tuple[cp.ndarray, cp.ndarray]]", tables: "cp.ndarray", batch: Batch, arena: Arena,
                 qr: "cp.ndarray") -> "cp.ndarray | None":
        """qr, and into the state what a layer keeps of the tokens. A chunk's raw rows [T, row bytes] are returned, for
        the ring does not hold so many at once."""
        s, ratio, eps = self.sizes, layer.ratio, self.config.rms_norm_eps
        compressors = [ops.Compressor(w.ape, w.norm, arena.frontier(i, j), arena.pools[i][j], index=j == 1)
                       for j, w in enumerate(layer.compressors)]
        if isinstance(batch, Step):
            ops.latent_step(latent, kv, layer.norms, tables, qr, arena.window(i), arena.layout.slot_bytes, batch.slots,
                            batch.positions, batch.pages, products, compressors, ratio, s, eps)
            return None
        fresh = scratch.take("fresh", (len(kv), s.row_bytes), np.uint8)
        ops.latent(latent, kv, layer.norms, tables[1 if ratio else 0], qr, fresh, s, eps)
        if ratio:
            first = batch.start // ratio
            table = scratch.take("groups", (2, batch.bound // ratio - first, s.pairs))
            ops.group_tables(first, ratio, self._frequencies, table)
            for (k, scores), of in zip(products, compressors, strict=True):
                ops.compress(k, scores, of, of.state[batch.slot], table, batch.pages, batch.start, ratio, s, eps)
        return fresh

    def _experts(self, layer: Layer, x: "cp.ndarray", ids: "cp.ndarray", update: ops.Update, step: bool) -> None:
        c, T = self.config, len(x)
        selected = scratch.take("selected", (T, c.num_experts_per_tok), np.int32)
        weight = scratch.take("weight", (T, c.num_experts_per_tok))
        how = layer.gate_bias, layer.gate_tid2eid, ids, c.routed_scaling_factor, selected, weight
        if step:
            ops.route_step(x, layer.gate, *how, ops.WayBack(layer.hc_ffn, update), self.exact)
        else:
            logits = scratch.take("router", (T, c.n_routed_experts))
            ops.dense(x, [layer.gate], [logits], quality=self.exact)
            ops.route(logits, *how)
        ops.experts(x, selected, weight, layer.w1, layer.w3, layer.w2, layer.shared, c.swiglu_limit, update.y,
                    quality=self.exact)
