"""GGUF tensor name -> attribute path, shape and allowed types; and the check of a whole file against them."""
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.dequant import dequantize
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.config import ARCHITECTURE, Config, shown
from ds4mlx.text.segments import CONTROL_LITERALS

log = logging.getLogger(__name__)

VECTOR = ("F32",)
TABLE = ("I32",)
HALF = ("F16", "F32", "BF16")                               # F16 in published files
EMBEDDING = ("F16", "F32", "BF16", "Q8_0")
DENSE = ("Q8_0", "F16", "F32", "BF16", "Q4_K")              # Q8_0 in published files
EXPERTS = ("IQ2_XXS", "Q2_K", "Q4_K", "MXFP4", "Q8_0", "F16", "BF16", "F32")
MAX_REPORTED = 20


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor must be. `path` is its official checkpoint name, dots as attributes, without `.weight`."""
    path: str
    shape: tuple[int, ...]
    kinds: tuple[str, ...]


def expected_tensors(config: Config) -> dict[str, Expected]:
    """Every tensor of a model of this configuration, by GGUF name."""
    c, streams = config, config.hc_mult * config.hidden_size
    tensors = {
        "token_embd.weight": Expected("embed", (c.vocab_size, c.hidden_size), EMBEDDING),
        "output_norm.weight": Expected("norm", (c.hidden_size,), VECTOR),
        "output.weight": Expected("head", (c.vocab_size, c.hidden_size), DENSE),
        "output_hc_fn.weight": Expected("hc_head_fn", (c.hc_mult, streams), HALF),
        "output_hc_base.weight": Expected("hc_head_base", (c.hc_mult,), VECTOR),
        "output_hc_scale.weight": Expected("hc_head_scale", (1,), VECTOR),
    }
    for i, ratio in enumerate(config.compress_ratios):
        layer = _hyper(config) | _attention(config) | _experts(config, hashed=i < config.num_hash_layers)
        if ratio:
            layer |= _compressor("attn_compressor", "attn.compressor", config, ratio, config.head_dim)
        if ratio == 4:
            layer |= _indexer(config)
        tensors |= {f"blk.{i}.{name}": Expected(f"layers.{i}.{path}", shape, kinds)
                    for name, (path, shape, kinds) in layer.items()}
    return tensors


Layer = dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]]


def _hyper(c: Config) -> Layer:
    mixes = (2 + c.hc_mult) * c.hc_mult  # pre, post and the square matrix
    layer: Layer = {}
    for part in ("hc_attn", "hc_ffn"):
        layer |= {f"{part}_fn.weight": (f"{part}_fn", (mixes, c.hc_mult * c.hidden_size), HALF),
                  f"{part}_base.weight": (f"{part}_base", (mixes,), VECTOR),
                  f"{part}_scale.weight": (f"{part}_scale", (3,), VECTOR)}
    return layer


def _attention(c: Config) -> Layer:
    low = c.o_groups * c.o_lora_rank
    return {
        "attn_norm.weight": ("attn_norm", (c.hidden_size,), VECTOR),
        "attn_q_a.weight": ("attn.wq_a", (c.q_lora_rank, c.hidden_size), DENSE),
        "attn_q_a_norm.weight": ("attn.q_norm", (c.q_lora_rank,), VECTOR),
        "attn_q_b.weight": ("attn.wq_b", (c.num_attention_heads * c.head_dim, c.q_lora_rank), DENSE),
        "attn_kv.weight": ("attn.wkv", (c.head_dim, c.hidden_size), DENSE),
        "attn_kv_a_norm.weight": ("attn.kv_norm", (c.head_dim,), VECTOR),
        "attn_sinks.weight": ("attn.attn_sink", (c.num_attention_heads,), VECTOR),
        "attn_output_a.weight": ("attn.wo_a", (low, c.num_attention_heads // c.o_groups * c.head_dim), DENSE),
        "attn_output_b.weight": ("attn.wo_b", (c.hidden_size, low), DENSE),
    }


def _compressor(name: str, path: str, c: Config, ratio: int, width: int) -> Layer:
    """Ratio 4 overlaps its groups: a carry half for the next group beside the own half."""
    columns = width * (2 if ratio == 4 else 1)
    return {
        f"{name}_kv.weight": (f"{path}.wkv", (columns, c.hidden_size), HALF),
        f"{name}_gate.weight": (f"{path}.wgate", (columns, c.hidden_size), HALF),
        f"{name}_ape.weight": (f"{path}.ape", (ratio, columns), HALF),
        f"{name}_norm.weight": (f"{path}.norm", (width,), VECTOR),
    }


def _indexer(c: Config) -> Layer:
    return {
        "indexer.attn_q_b.weight": ("attn.indexer.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), HALF),
        "indexer.proj.weight": ("attn.indexer.weights_proj", (c.index_n_heads, c.hidden_size), HALF),
    } | _compressor("indexer_compressor", "attn.indexer.compressor", c, 4, c.index_head_dim)


def _experts(c: Config, hashed: bool) -> Layer:
    hidden, mid, experts = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    choice: Layer = (
        {"ffn_gate_tid2eid.weight": ("ffn.gate_tid2eid", (c.vocab_size, c.num_experts_per_tok), TABLE)} if hashed
        else {"exp_probs_b.bias": ("ffn.gate_bias", (experts,), VECTOR)})
    return choice | {
        "ffn_norm.weight": ("ffn_norm", (hidden,), VECTOR),
        "ffn_gate_inp.weight": ("ffn.gate", (experts, hidden), HALF),
        "ffn_gate_exps.weight": ("ffn.experts_w1", (experts, mid, hidden), EXPERTS),
        "ffn_up_exps.weight": ("ffn.experts_w3", (experts, mid, hidden), EXPERTS),
        "ffn_down_exps.weight": ("ffn.experts_w2", (experts, hidden, mid), EXPERTS),
        "ffn_gate_shexp.weight": ("ffn.shared_w1", (mid, hidden), DENSE),
        "ffn_up_shexp.weight": ("ffn.shared_w3", (mid, hidden), DENSE),
        "ffn_down_shexp.weight": ("ffn.shared_w2", (hidden, mid), DENSE),
    }


def validate(file: GGUF) -> Config:
    """The configuration of a file that is a whole model of this family.

    Every key, then every tensor of the directory, then the vocabulary, then the small tensors whose values can be
    wrong; no matrix is read. Raises ModelFileError with all that is wrong at the first of these stages.
    """
    architecture = file.metadata.get("general.architecture", ARCHITECTURE)
    if not isinstance(architecture, str) or architecture != ARCHITECTURE:
        raise ModelFileError(f"{file.path}: general.architecture is {shown(architecture)}, need {ARCHITECTURE!r};"
                             " give a DeepSeek V4 Flash file")
    try:
        config = Config.from_gguf(file.metadata)
    except ModelFileError as error:
        raise ModelFileError(f"{file.path}: {error}") from None
    expected = expected_tensors(config)
    _report(file, list(_directory_problems(file, expected)))
    _report(file, list(_vocabulary_problems(file.metadata, config)))
    with file.scattered():
        _report(file, list(_value_problems(file, expected, config)))
    if unused := [name for name in file.tensors if name not in expected]:
        log.info("%s: %d tensors are not used: %s ...", file.path, len(unused), ", ".join(unused[:3]))
    return config


def _report(file: GGUF, problems: list[str]) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise ModelFileError(f"{file.path}: {problems[0]}; get a whole DeepSeek V4 Flash file")
    shown = problems[:MAX_REPORTED]
    rest = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    raise ModelFileError("\n  ".join([f"{file.path}: not a whole DeepSeek V4 Flash file:", *shown, *rest]))


def _directory_problems(file: GGUF, expected: Mapping[str, Expected]) -> Iterator[str]:
    for name, need in expected.items():
        wanted = f"need {' or '.join(need.kinds)} {list(need.shape)}"
        info = file.tensors.get(name)
        if info is None:
            yield f"tensor {name} is missing, {wanted}"
        elif info.shape != need.shape or info.kind not in need.kinds:
            yield f"tensor {name} is {info.kind} {list(info.shape)}, {wanted}"
        elif name.endswith("ffn_gate_exps.weight"):
            up = file.tensors.get(name.replace("gate", "up"))
            if up is not None and up.kind != info.kind:
                yield f"tensor {up.name} is {up.kind}, need {info.kind} as {name}"


def _vocabulary_problems(metadata: Mapping[str, object], config: Config) -> Iterator[str]:
    for key, only in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "joyai-llm")):
        found = metadata.get(key)
        if not isinstance(found, str) or found != only:
            yield f"{key} is {shown(found)}, need {only!r}"
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        yield "tokenizer.ggml.merges is not there as an array of strings"
    if not isinstance(tokens, list) or len(tokens) != config.vocab_size:
        found = f"has {len(tokens)} entries" if isinstance(tokens, list) else "is not there as an array of strings"
        yield f"tokenizer.ggml.tokens {found}, need {config.vocab_size}"
    elif missing := set(CONTROL_LITERALS).difference(tokens):
        yield f"tokenizer.ggml.tokens lacks {' '.join(sorted(missing))}"
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is not None and (not isinstance(kinds, np.ndarray) or len(kinds) != config.vocab_size):
        yield f"tokenizer.ggml.token_type has another length than {config.vocab_size}"


def _value_problems(file: GGUF, expected: Mapping[str, Expected], config: Config) -> Iterator[str]:
    for name, need in expected.items():
        if need.kinds == VECTOR:
            finite = np.isfinite(dequantize(file.raw(name), "F32"))
            if not finite.all():
                yield f"tensor {name} has {int((~finite).sum())} values that are not finite, need none"
        elif need.kinds == TABLE:
            rows = np.sort(dequantize(file.raw(name), "I32"), axis=1)
            low, high = rows[:, 0].min(), rows[:, -1].max()
            if low < 0 or high >= config.n_routed_experts:
                yield f"tensor {name} has values {low} to {high}, need 0 to {config.n_routed_experts - 1}"
            if repeats := int((rows[:, 1:] == rows[:, :-1]).any(axis=1).sum()):
                yield f"tensor {name} names an expert twice in {repeats} rows, need distinct experts"
