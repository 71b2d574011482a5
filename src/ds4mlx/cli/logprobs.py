"""`ds4mlx logprobs`: a greedy continuation with the likeliest tokens of every step."""
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    import numpy as np

    from ds4mlx.cli.probe import Probe

MAX_TOP_K = 128
STEPS = 16


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.probe import add_probe_flags
    parser = subparsers.add_parser(
        "logprobs", allow_abbrev=False, usage="ds4mlx logprobs FILE [OPTIONS]",
        help="show the likeliest tokens of each step after a prompt",
        description="One JSON object: a greedy continuation, and for each of its steps the likeliest tokens.")
    add_probe_flags(parser)
    parser.add_argument("-n", "--tokens", metavar="N", help=f"most steps ({STEPS})")
    parser.add_argument("--logprobs-top-k", metavar="K", default="20",
                        help=f"tokens shown of a step, up to {MAX_TOP_K} (20)")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    import json

    from ds4mlx.cli.probe import prefilled
    top_k = _top_k(args.logprobs_top_k)
    args.tokens = args.tokens or str(STEPS)
    with prefilled(args) as probe:
        steps = [_step(probe, i, logits, top_k) for i, logits in enumerate(greedy(probe))]
        report = {"source": "ds4mlx", "prompt_tokens": probe.prompt_tokens, "ctx": probe.session.context,
                  "top_k": top_k, "steps": steps}
    sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
    return 0


def greedy(probe: "Probe") -> "Iterator[np.ndarray]":
    """The logits of each step; the next step takes their first maximum. The last is that of EOS, or of the limit."""
    from ds4mlx.engine.protocol import Row, Sampling
    generated: list[int] = []
    limit = min(probe.settings.tokens, probe.session.context - probe.prompt_tokens)
    while len(generated) < limit:
        # One step at a time: where drafts are accepted, the session's logits are those of the last step only.
        row = Row(probe.session, Sampling(temperature=0.0), generated[-1] if generated else None, generated)
        steps, = probe.engine.decode([row])
        assert len(steps) == 1, "logprobs need an engine that does not draft"
        yield probe.logits()
        generated.append(steps[0].token)
        if steps[0].token == probe.tokenizer.eos:
            return


def _step(probe: "Probe", number: int, logits: "np.ndarray", top_k: int) -> dict[str, object]:
    import numpy as np
    wide = logits.astype(np.float64)
    normaliser = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    order = np.argsort(-logits, kind="stable")[:top_k]
    return {"step": number, "selected": probe.token(int(order[0])),
            "top_logprobs": [{"token": probe.token(int(i)), "logit": float(f"{logits[i]:.9g}"),
                              "logprob": float(f"{wide[i] - normaliser:.9g}")} for i in order]}


def _top_k(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TOP_K:
        raise UsageError(f"--logprobs-top-k is {text[:40]!r}, need a whole number from 1 to {MAX_TOP_K}")
    return int(text)
