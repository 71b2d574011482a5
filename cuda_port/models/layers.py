"""A model file's tensors as the graph wants them: matrices in their blocks, all else as arrays."""
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds4mlx.cuda_port import ops
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import can_be_tiled
from ds4mlx.cuda_port.launch import limits
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.cuda_port.weights import Loader
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.names import Expected, expected_tensors

Tensor = "Weight | cp.ndarray"
ARRAYS = ("norm", "base", "scale", "sink", "bias", "ape", "tid2eid")   # how the names of what is no matrix end


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    wkv: Weight
    wgate: Weight
    ape: "cp.ndarray"       # f32 [ratio, columns]
    norm: "cp.ndarray"      # f32 [width]


@dataclass(frozen=True, slots=True)
class Layer:
    """Attributes are named as in the published checkpoint."""
    ratio: int
    hc_attn: ops.Connection
    hc_ffn: ops.Connection
    wq_a: Weight
    wkv: Weight
    wq_b: Weight
    wo_a: Weight
    wo_b: Weight
    norms: ops.Norms
    attn_sink: "cp.ndarray"
    compressors: tuple[CompressorWeights, ...]      # attention's, then the indexer's
    index_wq_b: Weight | None
    index_weights_proj: Weight | None
    gate: Weight
    gate_bias: "cp.ndarray | None"
    gate_tid2eid: "cp.ndarray | None"
    w1: Weight
    w3: Weight
    w2: Weight
    shared: tuple[Weight, Weight, Weight]           # w1, w3, w2

    @property
    def form(self) -> tuple[object, ...]:
        """The same for layers that launch the same kernels."""
        matrices = (self.hc_attn.fn, self.hc_ffn.fn, self.wq_a, self.wkv, self.wq_b, self.wo_a, self.wo_b, self.gate,
                    self.w1, self.w3, self.w2, *self.shared, self.index_wq_b, self.index_weights_proj,
                    *(w for c in self.compressors for w in (c.wkv, c.wgate)))
        return (self.ratio, self.gate_tid2eid is None,
                *(w and (w.kind, w.shape, w.arranged, w.tiled) for w in matrices))


def tensors(file: GGUF, config: Config, loader: Loader) -> dict[str, Tensor]:
    """Every tensor by its checkpoint name. Matrices that share their bytes in the file are one on the card."""
    found: dict[str, Tensor] = {}
    held: dict[tuple[int, tuple[int, ...]], Weight] = {}
    names = {expected.path: name for name, expected in expected_tensors(config).items()}
    for name, expected in expected_tensors(config).items():
        info = file.tensors[name]
        if expected.path.endswith(ARRAYS):
            found[expected.path] = cp.asarray(dequantize(file.raw(name), info.kind))
            continue
        key = info.offset, info.shape
        if key not in held:
            weight = Weight(info.kind, loader.raw(name), info.shape)
            before, stacks, _ = expected.path.partition("experts_")
            tiled = bool(stacks) and can_be_tiled(*((of.kind, of.shape) for of in (
                file.tensors[names[f"{before}experts_{part}"]] for part in ("w1", "w3", "w2"))), limits())
            held[key] = _as_read(weight, expected, loader, tiled)
        found[expected.path] = held[key]
    return found


def _as_read(weight: Weight, expected: Expected, loader: Loader, tiled: bool) -> Weight:
    """Hyper-connections take F16 or F32; the embedding stays as it is; what is multiplied is put in order for that."""
    if "hc_" in expected.path:
        if weight.kind == "BF16":
            loader.wait()
            numbers = (weight.raw.view(cp.uint16).astype(cp.uint32) << 16).view(cp.float32)
            return Weight("F32", numbers.view(cp.uint8), weight.shape)
        return weight
    if expected.path == "embed":
        return weight
    loader.wait()
    return ops.arranged(weight, tiled)


def layer(found: Mapping[str, Tensor], config: Config, index: int) -> Layer:
    c, ratio = config, config.compress_ratios[index]

    def get(path: str) -> Tensor:
        return found[f"layers.{index}.{path}"]

    def compressor(path: str) -> CompressorWeights:
        return CompressorWeights(*(get(f"attn.{path}.{part}") for part in ("wkv", "wgate", "ape", "norm")))

    def connection(part: str) -> ops.Connection:
        return ops.Connection(get(f"hc_{part}_fn"), get(f"hc_{part}_scale"), get(f"hc_{part}_base"),
                              get(f"{part}_norm"), c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    paths = (["compressor"] if ratio else []) + (["indexer.compressor"] if ratio == 4 else [])
    hashed = index < c.num_hash_layers
    return Layer(
        ratio=ratio, hc_attn=connection("attn"), hc_ffn=connection("ffn"),
        **{name: get(f"attn.{name}") for name in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b", "attn_sink")},
        norms=ops.Norms(get("attn.q_norm"), get("attn.kv_norm")), compressors=tuple(map(compressor, paths)),
        index_wq_b=get("attn.indexer.wq_b") if ratio == 4 else None,
        index_weights_proj=get("attn.indexer.weights_proj") if ratio == 4 else None, gate=get("ffn.gate"),
        gate_bias=None if hashed else get("ffn.gate_bias"),
        gate_tid2eid=get("ffn.gate_tid2eid") if hashed else None,
        w1=get("ffn.experts_w1"), w3=get("ffn.experts_w3"), w2=get("ffn.experts_w2"),
        shared=(get("ffn.shared_w1"), get("ffn.shared_w3"), get("ffn.shared_w2")))


def layers(found: Mapping[str, Tensor], config: Config) -> Iterator[Layer]:
    return (layer(found, config, i) for i in range(config.num_hidden_layers))


def head(found: Mapping[str, Tensor], config: Config) -> ops.Connection:
    return ops.Connection(found["hc_head_fn"], found["hc_head_scale"], found["hc_head_base"], found["norm"], 0,
                          config.hc_eps, config.rms_norm_eps)
