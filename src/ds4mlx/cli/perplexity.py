"""`ds4mlx perplexity`: how well the model foresees a text, token by token."""
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Iterator, Sequence

    from ds4mlx.cli.loaded import Loaded

SEED_TOKENS = 32    # that are given and not scored, the first of them BOS
TOLD_EVERY = 512


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags
    parser = subparsers.add_parser(
        "perplexity", allow_abbrev=False, usage="ds4mlx perplexity FILE [OPTIONS]",
        help="show how well the model foresees a text",
        description=f"The text is fed as it is, a decode step a token; the first {SEED_TOKENS} tokens are given, all "
                    "others scored. One line: nll is the sum of their negative natural log-probabilities. Only numbers "
                    "of the same text, tokens and vocabulary can be compared.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="a text in UTF-8; - reads standard input")
    parser.add_argument("-n", "--tokens", metavar="N", help="of the text (as many as the context holds)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """0, or 130 when interrupted, after the line of what was scored. Raises Ds4Error."""
    import json
    import math

    from ds4mlx.cli.interrupt import INTERRUPTED
    from ds4mlx.cli.loaded import loaded
    from ds4mlx.cli.options import settings_from
    from ds4mlx.cli.prompt import raw_ids, read_text
    from ds4mlx.errors import BadRequest, UsageError
    if args.file is None:
        raise UsageError("no text is given; need FILE, or - for standard input")
    text, settings = read_text(args.file), settings_from(args)
    scored, nll, code = 0, 0.0, 0
    with loaded(settings) as model:
        most = min(settings.ctx, model.engine.info.context, settings.tokens if args.tokens else settings.ctx)
        ids = raw_ids(text, model.tokenizer)
        if len(ids) > most:
            print(f"ds4mlx perplexity: the first {most} of {len(ids)} tokens", file=sys.stderr)
            ids = ids[:most]
        if len(ids) <= SEED_TOKENS:
            raise BadRequest(f"{args.file}: {len(ids)} tokens, need more than the {SEED_TOKENS} that are given; give a "
                             "longer text")
        try:
            for logprob in logprobs(model, ids):
                scored, nll = scored + 1, nll - logprob
                if scored % TOLD_EVERY == 0:
                    print(f"{scored} of {len(ids) - SEED_TOKENS}: ppl={math.exp(nll / scored):.4f}", file=sys.stderr)
        except KeyboardInterrupt:
            code = INTERRUPTED
    if not scored:
        return code
    numbers = {"tokens": len(ids), "scored": scored, "nll": nll, "avg_nll": nll / scored, "ppl": math.exp(nll / scored)}
    if args.json:
        print(json.dumps(numbers))
    else:
        print(" ".join(f"{name}={value}" if isinstance(value, int) else f"{name}={value:.6f}"
                       for name, value in numbers.items()))
    return code


def logprobs(model: "Loaded", ids: "Sequence[int]") -> "Iterator[float]":
    """Of each token behind the seed, given all before it."""
    from ds4mlx.evaluation.vectors import log_softmax
    session = model.open(len(ids))
    model.prefill(session, ids[:SEED_TOKENS])
    for at in range(SEED_TOKENS, len(ids)):
        yield float(log_softmax(model.logits(session))[ids[at]])
        if at + 1 < len(ids):
            model.feed(session, ids[at], ids[SEED_TOKENS:at + 1])
