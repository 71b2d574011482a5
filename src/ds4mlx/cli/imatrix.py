"""`ds4mlx quantize imatrix`: how much the columns of a model's experts count, from prompts."""
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli.options import add_engine_flags
from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.config import Settings
    from ds4mlx.text.tokenizer import Tokenizer

FIELDS = ("prompt", "text")     # of a record, whichever is there


def add_action(actions: "_SubParsersAction[ArgumentParser]") -> None:
    parser = actions.add_parser(
        "imatrix", allow_abbrev=False, help="collect how much columns count, from prompts",
        usage="ds4mlx quantize imatrix --dataset FILE --out FILE [OPTIONS]",
        description="One forward pass over every prompt. The best model that fits the machine gives the best imatrix.")
    parser.add_argument("--dataset", metavar="FILE", help="JSON lines: an object with `prompt`, or a string: a "
                        "rendered prompt, control tokens included")
    parser.add_argument("--out", metavar="FILE", help="the imatrix to write: .dat, or GGUF")
    parser.add_argument("--max-prompts", metavar="N", help="stop after so many (all)")
    parser.add_argument("--max-tokens", metavar="N", help="stop after so many tokens (all)")
    add_engine_flags(parser)
    parser.set_defaults(parser=parser)


def run(args: Namespace) -> int:
    """Raises UsageError, ModelFileError, DoesNotFit."""
    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    from ds4mlx.engine.mlx_importance import collect
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.quant.importance import Entry, Importance, write
    from ds4mlx.text.tokenizer import Tokenizer
    dataset, out = (Path(_needed(args, name)) for name in ("dataset", "out"))
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: its directory does not exist; make it, or give another path")
    settings = settings_from(args)
    settings = replace(settings, model=resolve_model(settings))
    with GGUF.open(settings.model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    prompts = list(_prompts(dataset, tokenizer, settings, _limit(args, "max_prompts"), _limit(args, "max_tokens")))
    total, done = sum(map(len, prompts)), 0

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        end = "\n" if done == total or not sys.stderr.isatty() else "\r"
        print(f"{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)

    with engine_lock(settings, settings.model):
        found = collect(settings, settings.model, prompts, progress)
    entries = {name: Entry(s.sums.astype("float32"), s.counts.astype("float32")) for name, s in found.items()}
    write(Importance(out, entries, dataset.name, len(prompts)))
    idle = sum(int((s.counts == 0).sum()) for name, s in found.items() if name.endswith("ffn_gate_exps.weight"))
    print(f"{out}: {len(entries)} matrices from {len(prompts)} prompts; {idle} experts met no token", file=sys.stderr)
    return 0


def _needed(args: Namespace, name: str) -> str:
    value = getattr(args, name)
    if value is None:
        raise UsageError(f"--{name} is missing: {'a file of prompts' if name == 'dataset' else 'the imatrix to write'}")
    return value


def _limit(args: Namespace, name: str) -> int | None:
    value = getattr(args, name)
    if value is not None and (not value.isdecimal() or not 1 <= int(value[:18])):
        raise UsageError(f"--{name.replace('_', '-')} is {value[:40]!r}, need a whole number from 1 on")
    return None if value is None else int(value[:18])


def _prompts(dataset: Path, tokenizer: "Tokenizer", settings: "Settings", most: int | None,
             most_tokens: int | None) -> Iterator[list[int]]:
    """The token ids of each record, cut at the context. Raises UsageError."""
    from ds4mlx.text.segments import split_controls
    left = most_tokens
    count = 0
    for number, text in enumerate(_records(dataset), 1):
        ids = tokenizer.encode(split_controls(text))[:settings.ctx][:left]
        if not ids:
            raise UsageError(f"--dataset {dataset}: record {number} is empty; remove it")
        yield ids
        count, left = count + 1, None if left is None else left - len(ids)
        if count == most or left == 0:
            return
    if not count:
        raise UsageError(f"--dataset {dataset}: holds no prompt; give JSON lines")


def _records(dataset: Path) -> Iterator[str]:
    try:
        lines = dataset.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"--dataset {dataset}: cannot be read ({fault}); give a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as fault:
            raise UsageError(f"--dataset {dataset}: line {number} is no JSON ({fault}); give JSON lines") from None
        text = record if isinstance(record, str) else next(
            (record[name] for name in FIELDS if name in record), None) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UsageError(f"--dataset {dataset}: line {number} has no text, need a string or an object with one of "
                             f"{', '.join(FIELDS)}")
        yield text
