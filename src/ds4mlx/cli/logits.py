"""`ds4mlx logits`: the logits of the token after a prompt, all of them."""
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    import numpy as np


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.probe import add_probe_flags
    parser = subparsers.add_parser(
        "logits", allow_abbrev=False, usage="ds4mlx logits FILE [OPTIONS]",
        help="show the logits of the token after a prompt",
        description="One JSON object: where the logits come from, the likeliest token, and all logits by id.")
    add_probe_flags(parser)
    parser.add_argument("--npy", metavar="FILE", help="write the logits there as a NumPy array, and none to JSON")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    import json

    from ds4mlx.cli.probe import prefilled
    with prefilled(args) as probe:
        logits = probe.logits()
        best = int(logits.argmax())
        head = {"source": "ds4mlx", "model": probe.engine.info.name, "prompt_tokens": probe.prompt_tokens,
                "ctx": probe.session.context, "vocab": len(logits),
                "argmax": probe.token(best) | {"logit": float(f"{logits[best]:.9g}")}}
    line = json.dumps(head, ensure_ascii=False)
    if args.npy is None:
        # 9 significant digits give every float32 back; json.dumps would write the 17 of a double.
        line = f'{line[:-1]}, "logits": [{",".join("%.9g" % logit for logit in logits)}]}}'
    else:
        _save(args.npy, logits)
    sys.stdout.write(line + "\n")
    return 0


def _save(name: str, logits: "np.ndarray") -> None:
    import numpy as np

    from ds4mlx.errors import Ds4Error
    try:
        with open(name, "wb") as file:
            np.save(file, logits)
    except OSError as fault:
        raise Ds4Error(f"--npy {name}: {fault.strerror}; give a path that can be written") from fault
