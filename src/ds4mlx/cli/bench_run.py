"""One benchmark from command line to files: model, text, measurement, and where each row goes."""
import json
import os
import platform
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.cli.bench import INTERRUPTED, number
from ds4mlx.cli.bench_measure import Frontier, Measured, Sweep, measure
from ds4mlx.cli.bench_record import CsvFile, CsvStream, JsonFile
from ds4mlx.errors import BadRequest, Ds4Error

if TYPE_CHECKING:
    from ds4mlx.cli.bench_limit import Limit
    from ds4mlx.config import Settings
    from ds4mlx.engine.protocol import Engine
    from ds4mlx.text.tokenizer import Tokenizer


def measured(args: Namespace, sweep: Sweep) -> int:
    """0, or 130 when interrupted: what was complete by then is kept. Raises Ds4Error."""
    from ds4mlx.cli.bench_limit import limit
    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    from ds4mlx.cli.weights_bar import weights_bar
    from ds4mlx.engine.open import open_engine
    settings = settings_from(args)
    gb_s = None if args.bandwidth_gb_s is None else number(args.bandwidth_gb_s, "--bandwidth-gb-s", 1e-3, 1e6)
    settings = replace(settings, model=resolve_model(settings), ctx=sweep.context, default_thinking=False,
                       batched_session=sweep.concurrency)
    ids, tokenizer = _text(args, sweep, settings)
    with engine_lock(settings, settings.model), closing(open_engine(settings, weights_bar())) as engine:
        if engine.info.context < sweep.context:
            raise BadRequest(f"{sweep.context} tokens of context are asked for, the model takes {engine.info.context}; "
                             "lower --ctx-max")
        drawn = limit(settings.model, sweep.frontiers, gb_s, settings.engine) if args.plot or args.json else None
        with closing(Output(args, _head(args, settings, engine, sweep, drawn), tokenizer)) as output:
            code = _measure(engine, ids, sweep, tokenizer.eos, settings, output, args)
        if args.plot and output.done:
            _draw(Path(args.plot), engine, sweep, output.done, drawn)
    return code


def _measure(engine: "Engine", ids: list[int], sweep: Sweep, eos: int, settings: "Settings", output: "Output",
             args: Namespace) -> int:
    from ds4mlx.cli.bench_screen import Screen
    from ds4mlx.config import color_wanted
    title = f"{engine.info.name}, {engine.info.backend}"
    try:
        with _interrupts() as check, Screen(sweep, title, color_wanted("auto", sys.stderr.isatty())) as screen:
            def told(what: str, done: int, total: int) -> None:
                check()
                screen.told(what, done, total)

            for found in measure(engine, ids, sweep, eos, settings.prefill_chunk, told):
                output.add(found)
                screen.add(found.row)
                check()
    except KeyboardInterrupt:
        print(f"ds4mlx bench: interrupted, {len(output.done)} of {len(sweep.frontiers)} frontiers are measured",
              file=sys.stderr)
        return INTERRUPTED
    return 0


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """In here Ctrl+C waits for the check behind a slice or step, which raises KeyboardInterrupt: a row is in all files
    or in none, and nothing swallows it, as a callback may that happens to run."""
    came: list[int] = []

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _draw(path: Path, engine: "Engine", sweep: Sweep, rows: list[Frontier], limit: "Limit | None") -> None:
    from ds4mlx.cli.bench_plot import plot
    name = "measured" if sweep.concurrency == 1 else f"{sweep.concurrency} sessions together"
    plot(path, {name: rows}, f"{engine.info.name}, {engine.info.backend}", limit)


def _text(args: Namespace, sweep: Sweep, settings: "Settings") -> tuple[list[int], "Tokenizer"]:
    """Ids that reach the last frontier, and past it where a probe is fed them. Raises BadRequest for a short text."""
    from ds4mlx.cli.prompt import prompt_ids, read_text
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.text.tokenizer import Tokenizer
    name = args.prompt_file if args.chat_prompt_file is None else args.chat_prompt_file
    args.raw_prompt = args.chat_prompt_file is None
    text = read_text(name)
    with GGUF.open(settings.model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        ids = prompt_ids(text, args, settings, tokenizer, file.metadata)
    needed = sweep.frontiers[-1] + (sweep.gen_tokens if sweep.teacher_forced else 0)
    if len(ids) < needed:
        raise BadRequest(f"{name}: the text is {len(ids)} tokens, need {needed}; give a longer one or lower --ctx-max")
    return ids[:needed], tokenizer


class Output:
    """Where a row goes. What is in `done` is in every file."""

    def __init__(self, args: Namespace, head: dict[str, object], tokenizer: "Tokenizer") -> None:
        self.done: list[Frontier] = []
        self._concurrency, self._tokenizer = int(args.concurrency), tokenizer
        self._dump = Path(args.dump_frontier_logits_dir) if args.dump_frontier_logits_dir else None
        self._json = JsonFile(Path(args.json), head) if args.json else None
        self._head = head
        self._rows = CsvStream(sys.stdout) if args.csv is None else CsvFile(Path(args.csv), args.overwrite)

    def add(self, found: Measured) -> None:
        """Raises Ds4Error where one cannot be written."""
        self._rows.add(found.row)
        if self._json:
            self._json.add(found, {"session_gen_tps": found.row.gen_tps / self._concurrency})
        if self._dump:
            _dump_logits(self._dump, found, self._head, self._tokenizer)
        self.done.append(found.row)

    def close(self) -> None:
        self._rows.close()


def _dump_logits(folder: Path, found: Measured, head: dict[str, object], tokenizer: "Tokenizer") -> None:
    """As `ds4mlx logits` prints them."""
    logits, best = found.logits, int(found.logits.argmax())
    spelling = tokenizer.token_bytes(best) if best < tokenizer.vocab_size else b""
    told = json.dumps({
        "source": "ds4mlx", "model": head["model"]["name"], "prompt_tokens": found.row.ctx_tokens,
        "ctx": head["sweep"]["context"], "vocab": len(logits),
        "argmax": {"id": best, "text": spelling.decode("utf-8", "replace"), "bytes": list(spelling),
                   "logit": float(f"{logits[best]:.9g}")}}, ensure_ascii=False)
    path = folder / f"frontier_{found.row.ctx_tokens}.logits.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{told[:-1]}, "logits": [{",".join("%.9g" % logit for logit in logits)}]}}\n', "utf-8")
    except OSError as fault:
        with suppress(OSError):
            path.unlink()
        raise Ds4Error(f"{path}: {fault.strerror}; the rows before are kept") from fault


def _head(args: Namespace, settings: "Settings", engine: "Engine", sweep: Sweep,
          limit: "Limit | None") -> dict[str, object]:
    """What the numbers were measured on and how: nothing that names the machine's owner."""
    from ds4mlx import __version__
    flags = {name: value for name, value in vars(args).items()
             if name in ("engine", "ops", "prefill_chunk", "power", "quality", "kv_round") and value is not None}
    return {"source": "ds4mlx", "version": __version__,
            "machine": {"system": f"{platform.system()} {platform.release()}", "processor": platform.machine(),
                        "cores": os.cpu_count(), "python": platform.python_version(), "mlx": _version("mlx")},
            "model": asdict(engine.info), "flags": flags, "sweep": asdict(sweep),
            "thermal": f"not read; duty cycle {settings.power} %",
            "bandwidth_limit": asdict(limit) if limit else None,
            "not_comparable": ["the first row, from an empty state, with rows that go on from a frontier",
                               "gen_tps of several sessions together with that of one",
                               "a teacher-forced probe with a greedy one"]}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
