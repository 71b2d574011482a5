"""What one decoded token costs a GPU, kernel by kernel: launches and bytes, counted on real shapes, not estimated.

Launches are read from the graph that MLX would run: stand-ins take the place of our kernels, and the nodes of the
finished graph are counted. Bytes are what the emulator sees the kernels touch. Weights are zeros that take no memory,
so a layer of each kind is run in full and multiplied by how often it occurs.
"""
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from ds4mlx import ops
from ds4mlx.gguf.blocks import row_bytes
from ds4mlx.gguf.reader import GGUF, TensorInfo
from ds4mlx.models.deepseek_v4 import names, schema, weights
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.graph import Layer, Model
from ds4mlx.models.deepseek_v4.hyper import Update
from ds4mlx.models.deepseek_v4.layers import Batch
from ds4mlx.models.deepseek_v4.pages import page_count
from ds4mlx.models.deepseek_v4.stacked import StackedCompressor, StackedLayer
from ds4mlx.models.deepseek_v4.state import LayerPools
from ds4mlx.ops.kernel import Input, Launch, observe

if TYPE_CHECKING:
    from ds4mlx.metal_kernels.emulator import Traffic

RECIPES = {"q2": ("IQ2_XXS", "Q2_K"), "q4": ("Q4_K", "Q4_K"), "mxfp4": ("MXFP4", "MXFP4")}  # gate and up, down
Kinds = Mapping[str, str]   # of tensors by name
CACHE_BYTES = 4 << 20   # that a GPU's last-level cache surely keeps while a kernel runs
VIEWS = {"AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
         "Unflatten", "View",
         "Contiguous"}   # nodes that only describe memory; the last copies no slice that is nearly all of its array
STAND_IN = "Depends"    # the node that takes a kernel's place
SCRATCH = {"sums", "limits"}    # that one kernel of an op leaves for the next


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kernel, or of one operation of MLX, over a token."""
    name: str
    launches: int
    read_bytes: int      # from memory, as far as a cache of CACHE_BYTES does not hold what was read before
    written_bytes: int
    cached_bytes: int    # that threadgroups read again from that cache
    least_bytes: int     # that the operation cannot do without


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One kind of layer, or the token's embedding and output."""
    name: str
    count: int
    launches: int        # of one such layer, those of MLX's own operations included
    costs: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A token at the end of `context` tokens."""
    context: int
    weight_bytes: int    # of the file, that a token cannot do without
    row_bytes: int       # of the cache, likewise
    layers: tuple[LayerPlan, ...]

    def total(self, field: str) -> int:
        return sum(layer.count * getattr(cost, field) for layer in self.layers for cost in layer.costs)

    @property
    def ratio(self) -> float:
        """Bytes moved over the least."""
        return (self.total("read_bytes") + self.total("written_bytes")) / (self.weight_bytes + self.row_bytes)


def decode_plan(config: Config, kinds: Kinds, context: int, told: Callable[[str], None] = lambda layer: None) -> Plan:
    """Counts a token of a model of this configuration, its tensors of these kinds (`published_kinds`, `file_kinds`).
    `told` hears which layer is next: one of Flash takes some seconds. Raises EmulatorError where nothing compiles."""
    variants = list(_variants(config))
    originals = [variants.index(variant) for variant in dict.fromkeys(variants)]    # the first layer of each
    small = replace(config, num_hidden_layers=len(originals),
                    compress_ratios=tuple(config.compress_ratios[i] for i in originals),
                    num_hash_layers=sum(variants[i].hashed for i in originals))
    model = weights.load(Blank(small, _renumbered(kinds, originals)), small)
    pages = np.arange(1, 1 + page_count(context), dtype=np.int32)[None]
    batch = Batch(small, mx.zeros(1, mx.int32), np.array([context - 1]), pages)
    layers = []
    for index, original in enumerate(originals):
        variant = variants[original]
        told(str(variant))
        run = _layer(model.layers[index], batch, _update(small, index))
        counted = _counted(run, partial(_state, small, index, context))
        layers.append(LayerPlan(str(variant), variants.count(variant), *counted))
    told("embedding and output")
    layers.append(LayerPlan("embedding and output", 1, *_counted(_ends(model), partial(_update, small, 1))))
    return Plan(context, weight_bytes(config, kinds, context), cache_bytes(config, context), tuple(layers))


def published_kinds(config: Config, recipe: str) -> Kinds:
    """As published files have them, the routed experts by RECIPES[recipe]."""
    gate_up, down = RECIPES[recipe]
    return {name: down if "down_exps" in name else gate_up if "_exps." in name
            else "F16" if expected.kinds == names.EMBEDDING else expected.kinds[0]
            for name, expected in names.expected_tensors(config).items()}


def file_kinds(file: GGUF, config: Config) -> Kinds:
    return {name: file.tensors[name].kind for name in names.expected_tensors(config)}


def _renumbered(kinds: Kinds, originals: Sequence[int]) -> Kinds:
    """For a model of these layers only."""
    top = {name: kind for name, kind in kinds.items() if not name.startswith("blk.")}
    return top | {f"blk.{index}.{name.split('.', 2)[2]}": kind for index, original in enumerate(originals)
                  for name, kind in kinds.items() if name.startswith(f"blk.{original}.")}


def weight_bytes(config: Config, kinds: Kinds, context: int) -> int:
    """Bytes of the file that a token reads: its embedding row, its experts, and all the rest; of the indexer only the
    compressor while every row is attended."""
    total = 0
    for name, tensor in Blank(config, kinds).tensors.items():
        if name == "token_embd.weight" or name.endswith("tid2eid.weight"):
            total += tensor.nbytes // tensor.shape[0]
        elif "_exps." in name:
            total += tensor.nbytes // config.n_routed_experts * config.num_experts_per_tok
        elif not (".indexer." in name and context // 4 <= config.index_topk):
            total += tensor.nbytes
    return total


def cache_bytes(config: Config, context: int) -> int:
    """Bytes of the rows that a token attends to and, where rows are chosen, of those that it chooses from."""
    row, index = schema.attention_row(config, True).width, schema.index_row(config, True).width
    total = 0
    for ratio in config.compress_ratios:
        held = context // ratio if ratio else 0
        chosen = min(held, config.index_topk) if ratio == 4 else held
        total += (min(context, config.sliding_window) + chosen) * row
        total += held * index if ratio == 4 and held > config.index_topk else 0
    return total


class Blank:
    """What `weights.load` asks of a file: every tensor there, of zeros that take no memory until they are written."""

    def __init__(self, config: Config, kinds: Kinds) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        for name, expected in names.expected_tensors(config).items():
            kind = kinds[name]
            size = prod(expected.shape[:-1]) * row_bytes(kind, expected.shape[-1])
            self.tensors[name] = TensorInfo(name, expected.shape, kind, len(self.tensors), size)

    def raw(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        if info.kind == "I32":   # experts by token: they must differ
            return np.broadcast_to(np.arange(info.shape[-1], dtype=np.int32), info.shape).copy().view(np.uint8)
        return np.zeros((*info.shape[:-1], row_bytes(info.kind, info.shape[-1])), np.uint8)


class Variant(NamedTuple):
    """What makes layers differ in what they launch."""
    ratio: int
    hashed: bool

    def __str__(self) -> str:
        return f"{f'ratio {self.ratio}' if self.ratio else 'window only'}{', hashed' if self.hashed else ''}"


def _variants(config: Config) -> Iterator[Variant]:
    for i, ratio in enumerate(config.compress_ratios):
        yield Variant(ratio, i < config.num_hash_layers)


def _state(config: Config, index: int, context: int) -> StackedLayer:
    """A layer's state after context - 1 tokens, in a pool with room for one more: growing is rare."""
    row = schema.attention_row(config, True)
    pools = LayerPools.of(config, index, "official")
    for pool in pools:
        if pool:
            pool.grow(1 + page_count(context))
    windows = mx.zeros((1, config.sliding_window, row.width), mx.uint8)
    widths = config.head_dim, config.index_head_dim
    parts = [pool and StackedCompressor(mx.zeros((1, *schema.frontier_shape(pool.ratio, width))), pool)
             for pool, width in zip(pools, widths, strict=True)]
    state = StackedLayer(windows, *parts)
    mx.eval(state.rings())
    return state


def _update(config: Config, index: int) -> Update | None:
    """What the half layer before would hand over: nothing before the first layer."""
    n = config.hc_mult
    update = Update(mx.zeros((1, config.hidden_size)), mx.zeros((1, n)), mx.zeros((1, n, n)))
    mx.eval(*update)
    return update if index else None


def _layer(layer: Layer, batch: Batch, update: Update | None) -> Callable[[StackedLayer], Sequence[mx.array]]:
    def run(state: StackedLayer) -> Sequence[mx.array]:
        streams = mx.zeros((1, layer.config.hc_mult, layer.config.hidden_size))
        mx.eval(streams)
        streams, after = layer(streams, update, batch, state)
        return [streams, *after, *state.rings(), *(c.pool.rows for c in state.compressors())]
    return run


def _ends(model: Model) -> Callable[[Update], Sequence[mx.array]]:
    """Embedding, output and a sampled token."""
    def run(update: Update) -> Sequence[mx.array]:
        x = ops.dequantize(model.embed.take(mx.zeros(1, mx.int32)), model.embed.kind)
        logits = model.logits(mx.repeat(x[:, None], model.config.hc_mult, axis=1), update)
        return [ops.sample(logits, *(np.array([value]) for value in (0.5, 1.0, 0, 0.05, 1.0)))]
    return run


State = TypeVar("State")


def _counted(run: Callable[[State], Sequence[mx.array]], fresh: Callable[[], State]) -> tuple[int, tuple[Cost, ...]]:
    """Launches of all that `run` does with a fresh state, and the cost of each of our kernels in it."""
    from ds4mlx.metal_kernels.emulator import counting
    mlx = _graph_nodes(run, fresh())
    seen: list[Launch] = []
    with ops.only("metal-emulated"), observe(seen.append), counting() as traffic:
        mx.eval(run(fresh()))
    costs: dict[str, Cost] = {}
    for launch, moved in zip(seen, traffic, strict=True):
        costs[launch.kernel] = _added(costs.get(launch.kernel), launch, moved)
    own = tuple(Cost(name, count, 0, 0, 0, 0) for name, count in sorted(mlx.items()))
    return len(seen) + sum(mlx.values()), (*costs.values(), *own)


def _graph_nodes(run: Callable[[State], Sequence[mx.array]], state: State) -> Counter[str]:
    """The operations of MLX's own that launch something, in the graph that `run` builds."""
    with ops.only("metal"), observe(_stand_in), tempfile.TemporaryDirectory() as folder:
        drawing = Path(folder) / "graph.dot"
        mx.export_to_dot(str(drawing), *run(state))
        nodes = re.findall(r'label ="(\w+)"', drawing.read_text())
    return Counter(node for node in nodes if node != STAND_IN and node not in VIEWS)


def _stand_in(launch: Launch) -> list[mx.array]:
    """Arrays of a kernel's shapes that depend on its inputs."""
    blank = [mx.zeros(shape, dtype) for shape, dtype in launch.outputs]
    mx.eval(blank)
    return mx.depends(blank, [a for a in launch.inputs if isinstance(a, mx.array)])


def _added(cost: Cost | None, launch: Launch, moved: "Traffic") -> Cost:
    cost = cost or Cost(launch.kernel, 0, 0, 0, 0, 0)
    read = cached = 0
    for buffer in moved.buffers.values():
        again = buffer.reads.group_bytes - buffer.reads.distinct_bytes
        kept = buffer.reads.distinct_bytes <= CACHE_BYTES
        read += buffer.reads.distinct_bytes + (0 if kept else again)
        cached += again if kept else 0
    return Cost(cost.name, cost.launches + 1, cost.read_bytes + read, cost.written_bytes + moved.written_bytes,
                cost.cached_bytes + cached, cost.least_bytes + least_bytes(launch))


def least_bytes(launch: Launch) -> int:
    """Bytes of what the operation needs to see and to leave, each once."""
    inputs = dict(zip(launch.buffers, launch.inputs, strict=True))
    total = 0
    for name, array in inputs.items():
        if name not in SCRATCH and isinstance(array, mx.array | np.ndarray):
            total += array.nbytes if not array.ndim else array.nbytes // array.shape[0] * _seen(name, inputs)
    for_another_kernel = launch.kernel.startswith("attend_attend") and launch.outputs[0][0][2] > 1
    return total + (0 if for_another_kernel else sum(prod(shape) * dtype.size for shape, dtype in launch.outputs))


def _seen(name: str, inputs: Mapping[str, Input]) -> int:
    """How far along its first axis an input must be seen."""
    whole = inputs[name].shape[0]
    match name:
        case "gate" | "up" | "down" if inputs[name].ndim == 3:
            return min(whole, inputs["selected"].size if "selected" in inputs else whole)
        case "rows" if "chosen" in inputs:
            return min(inputs["count"], inputs["chosen"].size)
        case "rows" if "count" in inputs:
            return min(whole, inputs["count"])
        case "table" if "ids" in inputs:
            return min(whole, inputs["ids"].size)
        case "ape":
            return min(whole, inputs["k"].shape[0])
    return whole
