"""`ds4mlx inspect`: what a model file is and what it would need. Reads the header and small tensors, no weights."""
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli.model import resolve_model
from ds4mlx.cli.options import add_model_flags, settings_from
from ds4mlx.cli.tables import Table, aligned, print_rich, size
from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.models.deepseek_v4.config import Config
    from ds4mlx.models.deepseek_v4.names import Expected

CONTEXTS = (8192, 32768, 131072, 262144, 524288, 1048576)
SESSIONS = (1, 2, 4, 8, 16)


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "inspect", allow_abbrev=False, help="describe a model file without loading it",
        description="Name, fingerprints, sizes, quantisation and the memory that contexts need.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="GGUF file, or tiny: --model without the flag")
    add_model_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Print to standard output. Raises ModelFileError for a file that is not a whole model."""
    from ds4mlx.gguf.reader import GGUF  # NumPy takes half of what --help may
    with GGUF.open(_path(args)) as file:
        summary = summarize(file)
    if args.json:
        print(json.dumps(asdict(summary), indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        _print_rich(summary)
    else:
        print("\n".join(plain(summary)))
    return 0


def _path(args: Namespace) -> Path:
    if args.file and args.model:
        raise UsageError(f"both {args.file} and --model {args.model} are given, need one file")
    args.model = args.file or args.model
    return resolve_model(settings_from(args))


@dataclass(frozen=True, slots=True)
class Family:
    """Tensors of one purpose, over all layers."""
    name: str
    tensors: int
    kinds: tuple[str, ...]
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes for one session of `context` tokens, full; and beside the weights, for each number of SESSIONS."""
    context: int
    session_bytes: int
    total_bytes: dict[int, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """All that `inspect` shows; `--json` is this, field by field."""
    file: str
    file_bytes: int
    name: str
    checkpoint: str             # empty if the file does not say
    architecture: str
    weights_fp: str
    base_fp: str                # of the checkpoint the file was made from; weights_fp if it does not say
    layers: dict[str, int]      # by kind of attention and of routing
    config: dict[str, int | float | tuple[int, ...]]
    families: tuple[Family, ...]
    weights_bytes: int
    memory: tuple[Memory, ...]


def summarize(file: "GGUF") -> Summary:
    """Validates the file first. Raises ModelFileError."""
    from ds4mlx.models.fingerprint import weights_fp
    from ds4mlx.models.registry import family_of, label
    family = family_of(file.metadata)
    names, schema = family.role("names"), family.role("schema")
    config = names.validate(file)
    families = tuple(_families(file, names.expected_tensors(config)))
    weights = sum(f.nbytes for f in families)
    contexts = [c for c in CONTEXTS if c < config.max_position_embeddings] + [config.max_position_embeddings]
    sizes = {context: schema.session_bytes(config, context, packed=True) for context in contexts}
    fingerprint = weights_fp(file)
    return Summary(
        file=str(file.path), file_bytes=len(file.map), name=label(file.metadata, "general.name"),
        checkpoint=label(file.metadata, "ds4mlx.checkpoint"), architecture=family.architecture,
        weights_fp=fingerprint, base_fp=label(file.metadata, "ds4mlx.source_fp") or fingerprint,
        layers=_layers(config), config=asdict(config), families=families, weights_bytes=weights,
        memory=tuple(Memory(context, nbytes, {n: weights + n * nbytes for n in SESSIONS})
                     for context, nbytes in sizes.items()))


def _layers(config: "Config") -> dict[str, int]:
    ratios = Counter(config.compress_ratios)
    return {"total": config.num_hidden_layers, "window_only": ratios[0], "ratio_4": ratios[4],
            "ratio_128": ratios[128], "hash_routed": config.num_hash_layers}


FAMILIES = (  # the first whose mark is in the tensor's path
    ("routed experts", (".experts_",)), ("shared experts", (".shared_",)), ("indexers", (".indexer.",)),
    ("compressors", (".compressor.",)), ("hyper-connections", ("hc_",)), ("hash tables", (".gate_tid2eid",)),
    ("routers and biases", (".gate",)), ("attention", (".attn.w", ".attn.q_norm", ".attn.kv_norm")),
    ("token embedding", ("embed",)), ("output matrix", ("head",)), ("other norms, sinks", ("",)),
)


def _families(file: "GGUF", expected: Mapping[str, "Expected"]) -> Iterator[Family]:
    """Largest first."""
    members: dict[str, list[str]] = {}
    for name, need in expected.items():
        family = next(family for family, marks in FAMILIES if any(mark in need.path for mark in marks))
        members.setdefault(family, []).append(name)
    found = []
    for family, tensors in members.items():
        infos = [file.tensors[name] for name in tensors]
        kinds = Counter(info.kind for info in infos)
        found.append(Family(family, len(infos), tuple(kind for kind, _ in kinds.most_common()),
                            sum(prod(info.shape) for info in infos), sum(info.nbytes for info in infos)))
    yield from sorted(found, key=lambda f: -f.nbytes)


def _facts(s: Summary) -> list[tuple[str, str]]:
    c, layers = s.config, s.layers
    parameters = sum(f.parameters for f in s.families if f.name != "hash tables")
    return [
        ("file", f"{s.file} ({size(s.file_bytes)})"),
        ("name", s.name or "not given"),
        ("checkpoint", s.checkpoint or "not given"),
        ("weights", f"{size(s.weights_bytes)}, {parameters / 1e9:.3f} G parameters"),
        ("weights fingerprint", s.weights_fp),
        ("base fingerprint", s.base_fp),
        ("layers", f"{layers['total']}: {layers['window_only']} window only, {layers['ratio_4']} ratio 4,"
                   f" {layers['ratio_128']} ratio 128; {layers['hash_routed']} hash-routed"),
        ("hidden", f"{c['hidden_size']} in {c['hc_mult']} streams, vocabulary {c['vocab_size']}"),
        ("attention", f"{c['num_attention_heads']} heads of {c['head_dim']} ({c['qk_rope_head_dim']} rotary),"
                      f" window {c['sliding_window']}, indexer top {c['index_topk']}"),
        ("experts", f"{c['num_experts_per_tok']} of {c['n_routed_experts']} + {c['n_shared_experts']} shared,"
                    f" {c['moe_intermediate_size']} wide"),
        ("context", f"up to {c['max_position_embeddings']:,} tokens"),
    ]


def _tables(s: Summary) -> Iterator[Table]:
    yield Table("Tensors", ["family", "tensors", "types", "size"], [
        [f.name, str(f.tensors), " ".join(f.kinds), size(f.nbytes)] for f in s.families])
    yield Table("Memory, rows packed in FP8 and FP4; working memory comes on top", [
        "context", "a session", *(f"weights + {n}" for n in SESSIONS)], [
        [f"{m.context:,}", size(m.session_bytes), *map(size, m.total_bytes.values())] for m in s.memory])


def plain(s: Summary) -> Iterator[str]:
    """The summary as lines of aligned text."""
    yield from aligned(([label, text] for label, text in _facts(s)), right=False)
    for title, head, rows in _tables(s):
        yield ""
        yield title
        yield from aligned([head, *rows], right=True)


def _print_rich(s: Summary) -> None:
    from rich.console import Console
    from rich.table import Table as Rich
    from rich.text import Text
    facts = Rich(box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, text in _facts(s):
        facts.add_row(Text(label, "dim"), Text(text, overflow="fold"))
    Console(markup=False, highlight=False).print(facts)
    print_rich(_tables(s))
