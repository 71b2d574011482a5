"""An evaluation from command line to report: the model, each case, what is shown, what is kept."""
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ds4mlx.cli.eval import MOST_CONTEXT
from ds4mlx.cli.eval_report import report
from ds4mlx.cli.eval_view import LineView, View
from ds4mlx.errors import UsageError
from ds4mlx.evaluation.asking import Answered, Budget, Progress, ask
from ds4mlx.evaluation.cases import Case
from ds4mlx.evaluation.grading import grade
from ds4mlx.evaluation.trace import Record, TraceFile, record

if TYPE_CHECKING:
    from ds4mlx.config import Settings
    from ds4mlx.engine.protocol import Engine, Sampling, Session
    from ds4mlx.text.tokenizer import Tokenizer

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Asked:
    """A case and its prompt."""
    case: Case
    ids: list[int]
    thinking: bool

    @property
    def tools(self) -> list[str]:
        return [str(tool["function"]["name"]) for tool in self.case.tools]


@dataclass(slots=True)
class Stop:
    """Set by the first Ctrl+C or by `q`; the second Ctrl+C is an exception."""
    wanted: bool = False
    by_signal: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.wanted = self.by_signal = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True, slots=True)
class Exam:
    """What all cases share."""
    engine: "Engine"
    session: "Session"
    tokenizer: "Tokenizer"
    sampling: "Sampling"
    budget: Budget
    chunk: int
    compat: bool
    retry: bool
    stop: Stop = field(default_factory=Stop)

    def take(self, asked: Asked, view: View, index: int) -> Record | None:
        """One case, once more where it has to be; None where it was stopped."""
        answered, tries = self._ask(asked, view, index, self.budget), 1
        found = grade(asked.case, answered.said, self.compat)
        if self.retry and found.verdict == "incomplete" and answered.end != "cancelled":
            view.again(index)
            answered, tries = self._ask(asked, view, index, replace(self.budget, tokens=2 * self.budget.tokens)), 2
            found = grade(asked.case, answered.said, self.compat)
        return None if answered.end == "cancelled" else record(asked.case, answered, found, len(asked.ids), tries)

    def _ask(self, asked: Asked, view: View, index: int, budget: Budget) -> Answered:
        def told(progress: Progress) -> bool:
            if not view.progress(index, progress):
                self.stop.wanted = True
            return not self.stop.wanted

        return ask(self.engine, self.session, self.tokenizer, asked.ids, thinking=asked.thinking, tools=asked.tools,
                   sampling=self.sampling, budget=budget, chunk=self.chunk, told=told)


def evaluate(args: Namespace, cases: Sequence[Case], budget: Budget) -> int:
    """0, 3 or 130. Raises Ds4Error; what was graded by then is in the trace."""
    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    from ds4mlx.cli.weights_bar import weights_bar
    from ds4mlx.engine.open import open_engine
    args.tokens, args.temp = str(budget.tokens), args.temp or "0"
    settings = settings_from(args)
    settings = replace(settings, model=resolve_model(settings))
    asked, tokenizer = _prompts(cases, settings)
    context = max(len(one.ids) for one in asked) + budget.tokens * (2 if args.retry_incomplete else 1)
    if args.ctx:    # a larger one lets effort max be what it is
        context = max(context, settings.ctx)
    if context > MOST_CONTEXT:
        raise UsageError(f"--tokens: the longest prompt and its answer take {context} tokens, need {MOST_CONTEXT} at "
                         "most; lower --tokens")
    settings = replace(settings, ctx=context)
    with _trace(args) as trace, engine_lock(settings, settings.model), \
            closing(open_engine(settings, weights_bar())) as engine:
        exam = Exam(engine, engine.open(min(context, engine.info.context)), tokenizer, _sampling(settings), budget,
                    settings.prefill_chunk, args.compat_grading, args.retry_incomplete)
        records = _run(exam, asked, _view(args, asked, exam.stop), trace)
    code = report(args, records, len(asked))
    return INTERRUPTED if exam.stop.by_signal else code


def _run(exam: Exam, asked: Sequence[Asked], view: View, trace: TraceFile | None) -> list[Record]:
    """In the order that the view says, until it says that it is enough."""
    records: dict[int, Record] = {}
    before = signal.signal(signal.SIGINT, exam.stop)
    try:
        with view:
            while (index := view.next()) is not None:
                if exam.stop.wanted:
                    view.stopped(index)
                    break
                view.begin(index, len(asked[index].ids))
                found = exam.take(asked[index], view, index)
                if found is None:
                    view.stopped(index)
                    break
                if trace:
                    trace.add(found)
                records[index] = found
                view.end(index, found)
    finally:
        signal.signal(signal.SIGINT, before)
    return [records[index] for index in sorted(records)]


@contextmanager
def _trace(args: Namespace) -> Iterator[TraceFile | None]:
    trace = TraceFile(Path(args.trace)) if args.trace else None
    try:
        yield trace
    finally:
        if trace:
            trace.close()


def _view(args: Namespace, asked: Sequence[Asked], stop: Stop) -> View:
    from ds4mlx.cli.bench import whole
    from ds4mlx.config import dumb
    pause_s = whole(args.pause_ms, "--pause-ms", 0, 3_600_000) / 1e3
    if args.plain or dumb() or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return LineView([one.case for one in asked])
    from ds4mlx.cli.eval_screen import ScreenView
    return ScreenView([one.case for one in asked], pause_s, lambda: stop.wanted)


def _sampling(settings: "Settings") -> "Sampling":
    from ds4mlx.engine.protocol import Sampling
    return Sampling(settings.temp or 0.0, settings.top_p, settings.top_k, settings.min_p, settings.seed or 0)


def _prompts(cases: Sequence[Case], settings: "Settings") -> "tuple[list[Asked], Tokenizer]":
    """Rendered as a request to the server would be, without a system text."""
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.server.fields import Fields
    from ds4mlx.server.openai_chat import read_chat
    from ds4mlx.service.encoding import effort_profile, prompt_for, settled, wanted_effort
    from ds4mlx.text.tokenizer import Tokenizer
    with GGUF.open(settings.model) as file:
        profile = effort_profile(settings, file.metadata)
        tokenizer, asked = Tokenizer.from_gguf(file.metadata), []
        for case in cases:
            body = {"messages": [{"role": "user", "content": case.prompt()}],
                    **({"tools": list(case.tools)} if case.tools else {})}
            conversation = read_chat(Fields(body), settings).turn.conversation
            prompt = prompt_for(conversation, settings, file.metadata)
            asked.append(Asked(case, tokenizer.encode(prompt.segments), prompt.thinking))
    wanted, got = wanted_effort(conversation, settings, profile), settled(conversation, settings, profile, settings.ctx)
    if prompt.thinking and got.effort != wanted:
        print(f"ds4mlx eval: reasoning effort {wanted} needs a larger context than {settings.ctx} tokens; using "
              f"{got.effort}; raise --ctx, or set --think-level {got.effort}", file=sys.stderr)
    return asked, tokenizer
