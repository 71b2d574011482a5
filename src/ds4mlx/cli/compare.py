"""`ds4mlx compare`: whether logits are what they should be, by what others or this model said before."""
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.errors import Ds4Error, UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.cli.loaded import Loaded
    from ds4mlx.engine.protocol import Session
    from ds4mlx.evaluation.vectors import Golden, Official, VectorFile

UNMET = 3
SNAPSHOT = 64       # tokens of a case that is captured
SHOWN = 4           # faults of a step


@dataclass(frozen=True, slots=True)
class Outcome:
    """numbers: what was measured; faults: why it does not hold."""
    name: str
    numbers: dict[str, int | float | str]
    faults: tuple[str, ...]


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags
    parser = subparsers.add_parser(
        "compare", allow_abbrev=False, help="check logits against known ones",
        description="Against vectors of the hosted model or snapshots of these weights, in files of ds4's format; or "
                    "decoding against prefill. Exits with 3 where they differ too much. For a strict comparison give "
                    "--quality --prefill-chunk 2048.")
    what = parser.add_argument_group("what is compared")
    what.add_argument("--vectors", metavar="DIR", help="all .vec files of a folder, with their prompts; or one file")
    what.add_argument("--decode-consistency", metavar="N",
                      help="after N greedy steps, with a fresh prefill of the same tokens")
    what.add_argument("--capture", metavar="FILE.vec", help="write a snapshot of the prompt's logits to compare later")
    what.add_argument("--prompt-file", metavar="FILE", help="the text of the last two, as it is")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--tolerance", metavar="F", default="4", help="of official log-probabilities (4)")
    limits.add_argument("--max-abs", metavar="F", help="largest difference of a logit after decoding (any)")
    limits.add_argument("--any-checkpoint", action="store_true",
                        help="compare although the vectors are of another checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for each case")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """0; 3 where something differs too much. Raises Ds4Error, also where a comparison would mean nothing."""
    from ds4mlx.cli.bench import number, whole
    from ds4mlx.cli.loaded import loaded
    from ds4mlx.cli.options import settings_from
    wanted = [name for name in ("vectors", "decode_consistency", "capture") if getattr(args, name) is not None]
    if len(wanted) != 1:
        raise UsageError("need one of --vectors, --decode-consistency, --capture")
    if (args.prompt_file is None) != (wanted == ["vectors"]):
        raise UsageError("--vectors has prompts of its own; leave out --prompt-file" if args.prompt_file else
                         f"--{wanted[0].replace('_', '-')} needs a text; give --prompt-file")
    tolerance = number(args.tolerance, "--tolerance", 0, 1e6)
    most = None if args.max_abs is None else number(args.max_abs, "--max-abs", 0, 1e6)
    if args.capture and " " in args.prompt_file:
        raise UsageError(f"--prompt-file {args.prompt_file}: the format has no blanks in names; rename it")
    steps = whole(args.decode_consistency, "--decode-consistency", 1) if args.decode_consistency else 0
    files = _files(Path(args.vectors)) if args.vectors else []
    with loaded(settings_from(args)) as model:
        if args.capture:
            return capture(model, Path(args.capture), Path(args.prompt_file), args.json)
        if steps:
            return told([consistency(model, args.prompt_file, steps, most)], args.json)
        for file in files:
            if not args.any_checkpoint:
                check_checkpoint(model, file)
        return told((outcome for file in files for outcome in against(model, file, tolerance)), args.json)


def told(outcomes: Iterable[Outcome], as_json: bool) -> int:
    """A line each, as soon as it is known, then how many hold, which programs count themselves."""
    held, count = 0, 0
    for outcome in outcomes:
        count, held = count + 1, held + (not outcome.faults)
        if as_json:
            print(json.dumps({"name": outcome.name, **outcome.numbers, "holds": not outcome.faults,
                              "faults": outcome.faults}, ensure_ascii=False), flush=True)
            continue
        numbers = " ".join(f"{name}={value:.6f}" if isinstance(value, float) else f"{name}={value}"
                           for name, value in outcome.numbers.items())
        print(f"{outcome.name} {numbers} {'differs' if outcome.faults else 'holds'}", flush=True)
        for fault in outcome.faults:
            print(f"  {fault}")
    if not as_json:
        print(f"{held} of {count} hold")
    return 0 if held == count else UNMET


def _files(place: Path) -> "list[VectorFile]":
    from ds4mlx.evaluation.vectors import read_vectors
    paths = sorted(place.glob("*.vec")) if place.is_dir() else [place]
    if not paths:
        raise UsageError(f"--vectors {place}: no .vec file is there; give a folder of them, or one")
    return [read_vectors(path) for path in paths]


def check_checkpoint(model: "Loaded", file: "VectorFile") -> None:
    """Raises Ds4Error for vectors of other weights: a difference would say nothing of the computation."""
    from ds4mlx.service.encoding import effort_profile
    info = model.engine.info
    if file.model and file.model != info.fingerprint:
        raise Ds4Error(f"{file.path}: a snapshot of other weights ({file.model[:16]}…, these are "
                       f"{info.fingerprint[:16]}…); capture one of these, or give --any-checkpoint")
    dated = "0731" in file.path.absolute().parent.name
    if not file.model and dated != (effort_profile(model.settings, model.metadata) == "0731"):
        raise Ds4Error(f"{file.path}: vectors of the {'checkpoint of 07-31' if dated else 'first checkpoint'}, and "
                       f"{info.name or 'the model'} is not of it, by its name; give the other folder, --effort-profile "
                       "if the name does not say, or --any-checkpoint")


def against(model: "Loaded", file: "VectorFile", tolerance: float) -> "Iterable[Outcome]":
    """One outcome a case."""
    from ds4mlx.evaluation.vectors import Official
    ids = spellings(model)
    for case in file.cases:
        text = _text(file.prompt_file(case))
        yield _official(model, case, text, ids, tolerance) if isinstance(case, Official) else _golden(model, case, text)


def spellings(model: "Loaded") -> dict[bytes, list[int]]:
    """The tokens of each spelling."""
    found: dict[bytes, list[int]] = {}
    for token in range(model.engine.info.vocab):
        try:
            found.setdefault(model.tokenizer.token_bytes(token), []).append(token)
        except ValueError:
            pass    # an id that the vocabulary leaves unused
    return found


def _official(model: "Loaded", case: "Official", text: str, ids: dict[bytes, list[int]], tolerance: float) -> Outcome:
    """Steps are fed the official tokens, so that one that differs does not spoil the next."""
    from ds4mlx.cli.loaded import chat_ids
    from ds4mlx.evaluation.vectors import step_faults
    prompt = chat_ids(model, text)
    session = _opened(model, case.id, case.context, len(prompt) + len(case.steps))
    model.prefill(session, prompt)
    faults: list[str] = []
    fed: list[int] = []
    for number, step in enumerate(case.steps):
        logits = model.logits(session)
        found = step_faults(step, logits, ids, tolerance)
        faults += [f"step {number}: {fault}" for fault in found[:SHOWN]]
        if len(found) > SHOWN:
            faults.append(f"step {number}: and {len(found) - SHOWN} more")
        if number + 1 < len(case.steps):
            if not (spelled := ids.get(step.selected)):
                break
            fed.append(max(spelled, key=lambda token: float(logits[token])))
            model.feed(session, fed[-1], fed)
    session.close()
    return Outcome(case.id, {"prompt_tokens": len(prompt), "steps": len(case.steps)}, tuple(faults))


def _golden(model: "Loaded", case: "Golden", text: str) -> Outcome:
    from ds4mlx.evaluation.vectors import golden_faults
    ids = _ids(model, case.mode, text)
    if len(ids) < case.frontier:
        raise Ds4Error(f"{case.prompt}: {len(ids)} tokens, {case.id} needs {case.frontier}; get the prompt it was "
                       "captured with")
    session = _opened(model, case.id, case.context, case.frontier)
    model.prefill(session, ids[:case.frontier])
    logits = model.logits(session)
    session.close()
    worst = max(abs(float(logits[token]) - logit) for token, logit in case.top)
    return Outcome(case.id, {"prompt_tokens": case.frontier, "max_abs": worst}, tuple(golden_faults(case, logits)))


def _ids(model: "Loaded", mode: str, text: str) -> list[int]:
    from ds4mlx.cli.loaded import chat_ids
    from ds4mlx.cli.prompt import raw_ids
    return chat_ids(model, text) if mode == "chat" else raw_ids(text, model.tokenizer)


def capture(model: "Loaded", path: Path, prompt: Path, as_json: bool) -> int:
    """A snapshot of one case, of the whole text. Raises Ds4Error where a file is."""
    import numpy as np

    from ds4mlx.evaluation.vectors import Golden, golden_text
    ids = _ids(model, "text", _text(prompt))
    context = len(ids) + 1
    session = _opened(model, "--capture", context, len(ids))
    model.prefill(session, ids)
    logits = model.logits(session)
    top = tuple((int(i), float(logits[i])) for i in np.argsort(-logits, kind="stable")[:SNAPSHOT])
    case = Golden(prompt.stem.replace(" ", "_"), "text", context, len(ids), str(prompt), top)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(f"# ds4-local-golden-v1\n# model {model.engine.info.fingerprint}\n\n{golden_text(case)}\n")
    except OSError as fault:
        raise Ds4Error(f"--capture {path}: {fault.strerror}; give a path where nothing is") from fault
    print(json.dumps({"name": case.id, "prompt_tokens": len(ids), "top": len(top)}) if as_json else
          f"{case.id} prompt_tokens={len(ids)} top={len(top)}")
    return 0


def consistency(model: "Loaded", name: str, steps: int, most: float | None) -> Outcome:
    """Logits after greedy steps beside those of a fresh prefill of the same tokens."""
    import numpy as np
    ids = _ids(model, "text", _text(Path(name)))
    session = _opened(model, "--decode-consistency", len(ids) + steps, len(ids) + steps)
    model.prefill(session, ids)
    fed: list[int] = []
    for _ in range(steps):
        fed.append(int(model.logits(session).argmax()))
        model.feed(session, fed[-1], fed)
    decoded = model.logits(session).astype(np.float64)
    session.close()
    fresh = model.open(len(ids) + steps)
    model.prefill(fresh, [*ids, *fed])
    prefilled = model.logits(fresh).astype(np.float64)
    apart = np.abs(decoded - prefilled)
    same = int(decoded.argmax()) == int(prefilled.argmax())
    faults = [*([] if same else [f"the likeliest token is {decoded.argmax()} after steps, {prefilled.argmax()} after "
                                 "prefill"]),
              *([f"a logit is {apart.max():.6f} away, need {most} at most"] if most is not None and apart.max() > most
                else [])]
    numbers = {"prompt_tokens": len(ids), "steps": steps, "max_abs": float(apart.max()),
               "rms": float(np.sqrt((apart ** 2).mean())), "argmax": "equal" if same else "differs"}
    return Outcome("decode-consistency", numbers, tuple(faults))


def _opened(model: "Loaded", name: str, context: int, needed: int) -> "Session":
    session = model.open(max(context, needed))
    if session.context < needed:
        raise Ds4Error(f"{name}: {needed} tokens, the context is {session.context}; raise --ctx")
    return session


def _text(path: Path) -> str:
    from ds4mlx.cli.prompt import read_text
    return read_text(str(path))
