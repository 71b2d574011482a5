"""`ds4mlx eval`: questions with a known answer, asked and graded. Whether a model still works, not how good it is."""
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.errors import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.evaluation.asking import Budget
    from ds4mlx.evaluation.cases import Case

TOKENS, MOST_CONTEXT = 16000, 1_000_000
UNMET = 3
OTHERS = {"gpqa": "CSV", "supergpqa": "JSON lines", "aime": "JSON lines or CSV"}


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags, add_sampling_flags, add_thinking_flags
    parser = subparsers.add_parser(
        "eval", allow_abbrev=False, help="ask questions with known answers, and grade them",
        description="The questions that come with ds4mlx (tool use, code reading, arithmetic, look-ups in long texts, "
                    "instructions), your own, or GPQA, SuperGPQA and AIME from files that you have. A check that a "
                    "model works as it did, no leaderboard.")
    _add_case_flags(parser.add_argument_group("cases"))
    _add_budget_flags(parser.add_argument_group("budget"))
    _add_output_flags(parser.add_argument_group("output"))
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--seed", metavar="N", help="of the draws, where --temp is not 0")
    add_thinking_flags(parser)
    told = {"tokens": f"tokens of an answer, reasoning among them ({TOKENS})",
            "temp": "temperature; 0: always the likeliest token (0)", "ctx": "context (longest prompt and answer)"}
    for action in parser._actions:
        action.help = told.get(action.dest, action.help)
    parser.set_defaults(run=run)


def _add_case_flags(group: ArgumentParser) -> None:
    group.add_argument("--suite", metavar="core|hard|hard-smoke|all", default="core",
                       help="these, or a suite of your own (core)")
    group.add_argument("--cases", metavar="FILE", action="append", help="cases of your own, JSON lines; repeatable")
    for name, form in OTHERS.items():
        group.add_argument(f"--{name}", metavar="FILE", help=f"questions of that name, as published ({form})")
    group.add_argument("--source", metavar="NAME", help="those of one source: own, GPQA, SuperGPQA, AIME, …")
    group.add_argument("--domain", metavar="NAME", help="those of one domain: tools, code, arithmetic, …")
    group.add_argument("--case-id", metavar="ID", action="append", help="this case; repeatable")
    group.add_argument("--questions", metavar="N", help="the first so many")
    group.add_argument("--case-sequence", metavar="N,…", help="these, by their place in --list-cases, in this order")
    group.add_argument("--list-cases", action="store_true", help="list them and leave")
    group.add_argument("--validate-cases", action="store_true", help="check them and leave")


def _add_budget_flags(group: ArgumentParser) -> None:
    group.add_argument("--retry-incomplete", action="store_true",
                       help="ask once more, with twice the tokens, where there was no answer")
    group.add_argument("--soft-limit-reply-budget", metavar="N", default="1024",
                       help="with so many tokens left, end reasoning where the model is nearly ready to (1024)")
    group.add_argument("--hard-limit-reply-budget", metavar="N", default="512",
                       help="with so many left, end it anyway (512)")
    group.add_argument("--soft-limit-think-close-rank", metavar="N", default="3",
                       help="nearly ready: the end is among so many likeliest tokens (3)")


def _add_output_flags(group: ArgumentParser) -> None:
    group.add_argument("--trace", metavar="FILE", help="all that was asked and said, a JSON object a line")
    group.add_argument("--regrade-trace", metavar="FILE", help="grade such a file again, without a model")
    group.add_argument("--json", metavar="FILE", help="the result as one object")
    group.add_argument("--min-pass", metavar="N|P%", help="exit with 3 when fewer pass")
    group.add_argument("--compat-grading", action="store_true", help="extract choices and integers as ds4 does")
    group.add_argument("--self-test-extractors", action="store_true", help="try the grading on known texts and leave")
    group.add_argument("--plain", action="store_true", help="a line a case, on a terminal too")
    group.add_argument("--pause-ms", metavar="N", default="350", help="on a terminal, between two cases (350)")


def run(args: Namespace) -> int:
    """0; 3 when --min-pass is not met; 130 when interrupted. Raises Ds4Error."""
    if args.self_test_extractors:
        return _self_test()
    if args.regrade_trace:
        from ds4mlx.cli.eval_report import regrade
        return regrade(args)
    cases = chosen(args)
    if args.list_cases or args.validate_cases:
        return _list(args, cases)
    budget = budget_of(args)
    from ds4mlx.cli.bench import writable
    from ds4mlx.cli.eval_report import least
    least(args.min_pass, len(cases))    # misuse is told before the model is loaded
    writable(args.json, "--json")
    from ds4mlx.cli.eval_run import evaluate
    return evaluate(args, cases, budget)


def _self_test() -> int:
    from ds4mlx.evaluation.selftest import TABLE, wrong
    found = wrong()
    print(*found, f"{len(TABLE) - len(found)} of {len(TABLE)} texts are read as they should be", sep="\n")
    return 1 if found else 0


def chosen(args: Namespace) -> "list[Case]":
    """Those that the command line means. Raises UsageError where there is none."""
    from ds4mlx.evaluation import importers
    from ds4mlx.evaluation.cases import SUITES, own_cases, read_cases, select
    given = [case for name in args.cases or () for case in read_cases(Path(name))]
    for name in OTHERS:
        if getattr(args, name):
            given += importers.read(name, Path(getattr(args, name)))
    cases = [*own_cases(), *given]
    if args.suite not in (known := dict.fromkeys([*SUITES, *(case.suite for case in given)])):
        raise UsageError(f"--suite is {args.suite[:40]!r}, need one of {', '.join(known)}")
    if twice := [name for name, count in Counter(case.id for case in cases).items() if count > 1]:
        raise UsageError(f"two cases have the id {twice[0]!r}; rename one")
    cases = select(cases, "all" if args.case_id else args.suite, args.source, args.domain)
    if args.case_id:
        if missing := set(args.case_id) - {case.id for case in cases}:
            raise UsageError(f"--case-id {min(missing)}: no such case; --list-cases --suite all shows them")
        cases = [case for case in cases if case.id in args.case_id]
    cases = _cut(args, cases)
    if not cases:
        raise UsageError("no case is chosen; --list-cases --suite all shows them")
    return cases


def _cut(args: Namespace, cases: "list[Case]") -> "list[Case]":
    from ds4mlx.cli.bench import whole
    if args.case_sequence is not None:
        cases = [cases[whole(part.strip(), "--case-sequence", 1, len(cases)) - 1]
                 for part in args.case_sequence.split(",")]
    return cases if args.questions is None else cases[:whole(args.questions, "--questions", 1)]


def _list(args: Namespace, cases: "list[Case]") -> int:
    from ds4mlx.cli.tables import Table, print_tables
    if args.validate_cases:     # reading them has done it
        print(f"{len(cases)} cases can be asked and graded")
        return 0
    print_tables([Table("Cases", ["", "id", "suite", "source", "domain", "kind"], [
        [str(i), case.id, case.suite, case.source, case.domain, case.kind] for i, case in enumerate(cases, 1)])])
    return 0


def budget_of(args: Namespace) -> "Budget":
    """Raises UsageError for limits that contradict each other."""
    from ds4mlx.cli.bench import whole
    from ds4mlx.evaluation.asking import Budget
    tokens = TOKENS if args.tokens is None else whole(args.tokens, "--tokens", 1)
    soft = whole(args.soft_limit_reply_budget, "--soft-limit-reply-budget", 0)
    hard = whole(args.hard_limit_reply_budget, "--hard-limit-reply-budget", 0)
    rank = whole(args.soft_limit_think_close_rank, "--soft-limit-think-close-rank", 1, 128)
    if hard > soft:
        raise UsageError(f"--hard-limit-reply-budget is {hard}, need at most --soft-limit-reply-budget, {soft}")
    if hard >= tokens:
        raise UsageError(f"--hard-limit-reply-budget is {hard}, need less than --tokens, {tokens}")
    return Budget(tokens, soft, hard, rank)
