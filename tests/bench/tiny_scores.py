"""How well does the built-in model call tools and find facts? Held-out tasks, through a server, by both official SDKs.

    python tests/bench/tiny_scores.py [FILE.gguf ...] [--limit 300] [--needles 60] [--rows 64] [--slots 8] [--seed 0]
                                      [--direct] [--engine mlx|cuda]

Two CPU cores take 8 minutes for a file, most of them to read prompts: 60 facts are 330,000 tokens, 300 tasks
240,000. `--limit 100 --needles 12` tells the same within 4 % sooner; `ds4mlx.tiny.training.marks` tells in
seconds on a GPU which answers would be right in every token.

For each file (the built-in model without one) a server answers at temperature 0: of the tasks with tools, odd ones over
/v1/chat/completions with OpenAI's client, even ones over /v1/messages with Anthropic's. No name or value of a task is
in the lessons. Prints a table of shares and, with --failures, what was wanted and what came.

    well-formed calls     of the answers to tasks that need calls: calls of tools that were offered, arguments of a JSON
                          object with all required names and none that the schema has not
    arguments right       the same calls as wanted: number, order, names, every argument and no other
    result stated         of the tasks with results: the last answer holds every value that they hold
    rightly no call       of the tasks that no tool fits
    needle found          facts that lie 2,000 to 8,000 tokens back
    perplexity            of the answers' tokens of held-out lessons
"""
import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ds4mlx.tiny import lessons
from ds4mlx.tiny.lessons.packing import ANSWER
from ds4mlx.tiny.lessons.tasks import Task, held_out, needles

if TYPE_CHECKING:
    from ds4mlx.api import Model

CONTEXT, MOST_TOKENS = 12288, 400
NAMES = ("well-formed calls", "arguments right", "result stated", "rightly no call", "needle found")
ROW = 1024           # tokens of a row for perplexity
Call = tuple[str, object]


class Chat:
    """A task over Chat Completions."""

    def __init__(self, url: str, task: Task) -> None:
        import openai
        self.fault, self.omit = openai.APIStatusError, openai.omit
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0, timeout=1200)
        self.task = task
        self.history: list[dict] = [{"role": "system", "content": task.system}] if task.system else []
        self.history.append({"role": "user", "content": task.question})

    def ask(self) -> tuple[list[Call], str]:
        tools = [{"type": "function", "function": schema} for schema in self.task.tools] or self.omit
        answer = self.client.chat.completions.create(
            model="any", messages=self.history, tools=tools, temperature=0, max_tokens=MOST_TOKENS,
            extra_body={"thinking": {"type": "enabled" if self.task.thinking else "disabled"}})
        message = answer.choices[0].message
        self.history.append(message.model_dump(exclude_none=True))
        calls = [(call.function.name, _parsed(call.function.arguments)) for call in message.tool_calls or ()]
        self.ids = [call.id for call in message.tool_calls or ()]
        return calls, message.content or ""

    def tell(self, results: tuple[str, ...]) -> None:
        self.history += [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in zip(self.ids, results)]


class Messages:
    """The same over Messages."""

    def __init__(self, url: str, task: Task) -> None:
        import anthropic
        self.fault, self.omit = anthropic.APIStatusError, anthropic.omit
        self.client = anthropic.Anthropic(base_url=url, api_key="local", max_retries=0, timeout=1200)
        self.task = task
        self.history: list[dict] = [{"role": "user", "content": task.question}]

    def ask(self) -> tuple[list[Call], str]:
        tools = [{"name": schema["name"], "description": schema["description"], "input_schema": schema["parameters"]}
                 for schema in self.task.tools] or self.omit
        thinking = {"type": "enabled", "budget_tokens": 1024} if self.task.thinking else {"type": "disabled"}
        message = self.client.messages.create(
            model="any", max_tokens=MOST_TOKENS, system=self.task.system or self.omit, tools=tools,
            messages=self.history, extra_body={"thinking": thinking, "temperature": 0})
        self.history.append({"role": "assistant", "content": [part.model_dump() for part in message.content]})
        used = [part for part in message.content if part.type == "tool_use"]
        self.ids = [part.id for part in used]
        return ([(part.name, part.input) for part in used],
                "".join(part.text for part in message.content if part.type == "text"))

    def tell(self, results: tuple[str, ...]) -> None:
        self.history.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": id_, "content": text} for id_, text in zip(self.ids, results)]})


class Direct:
    """The same in this process, by `ds4mlx.load`: for a machine without the clients, and to compare with."""

    def __init__(self, model: "Model", task: Task) -> None:
        from ds4mlx.errors import Ds4Error
        self.fault, self.session, self.task = Ds4Error, model.session(CONTEXT), task
        self.told: list[dict] = [{"role": "system", "content": task.system}] if task.system else []
        self.told.append({"role": "user", "content": task.question})
        self.client = self.session

    def ask(self) -> tuple[list[Call], str]:
        from ds4mlx.engine.protocol import Sampling
        tools = [{"type": "function", "function": schema} for schema in self.task.tools]
        answer = self.session.chat(self.told, tools=tools, thinking=self.task.thinking, max_tokens=MOST_TOKENS,
                                   sampling=Sampling(temperature=0)).wait()
        self.ids = answer.call_ids
        return [(name, _parsed(arguments)) for name, arguments in answer.calls], answer.text

    def tell(self, results: tuple[str, ...]) -> None:
        self.told = [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in zip(self.ids, results)]


@dataclass(slots=True)
class Score:
    """Of each question how often it held, and of how many. failures: in words."""
    held: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def count(self, name: str, held: bool, failure: str = "") -> None:
        with self.lock:
            self.asked[name] += 1
            self.held[name] += held
            if not held:
                self.failures.append(f"{name}: {failure}")

    def told(self, name: str) -> str:
        asked = self.asked[name]
        return f"{100 * self.held[name] / asked:.1f} % of {asked}" if asked else "-"


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def well_formed(calls: list[Call], task: Task) -> bool:
    """Whether a client could run all of them."""
    schemas = {schema["name"]: schema["parameters"] for schema in task.tools}
    return bool(calls) and all(
        name in schemas and isinstance(arguments, dict) and set(schemas[name]["required"]) <= set(arguments)
        and set(arguments) <= set(schemas[name]["properties"]) for name, arguments in calls)


def answered(conversation: Chat | Messages) -> tuple[list[Call], str]:
    """Calls and text; what the server says instead where the model broke off inside a call."""
    try:
        return conversation.ask()
    except conversation.fault as fault:
        return [], f"{type(fault).__name__}: {fault}"


def attempt(score: Score, make: Callable[[], Chat | Messages], task: Task) -> None:
    """One task, from its question to what the last answer states."""
    conversation = make()
    with conversation.client:
        _attempted(score, conversation, task)


def _attempted(score: Score, conversation: Chat | Messages, task: Task) -> None:
    calls, text = answered(conversation)
    wanted: list[Call] = [(call.name, call.arguments) for call in task.calls]
    came = f"{task.question[-300:]!r}\n    wanted {wanted or list(task.stated)}\n    came   {calls} {text!r}"
    if not task.tools:
        score.count("needle found", all(value in text for value in task.stated), came)
        return
    if not wanted:
        score.count("rightly no call", not calls, came)
        return
    right = calls == wanted
    score.count("well-formed calls", well_formed(calls, task), came)
    score.count("arguments right", right, came)
    if len(calls) != len(wanted):
        score.count("result stated", False, "no result could be given")
        return
    conversation.tell(task.results)
    calls, text = answered(conversation)
    score.count("result stated", not calls and all(value in text for value in task.stated),
                f"{task.results}\n    came   {calls} {text!r}")


@contextmanager
def served(model: str, slots: int, engine: str) -> Iterator[str]:
    """The URL of a server that stops at the end."""
    with subprocess.Popen(
            [sys.executable, "-m", "ds4mlx", "serve", "--model", model, "--engine", engine, "--port", "0", "--ctx",
             str(CONTEXT), "--batched-session", str(slots), "--no-lock", "--log-level", "warning"],
            stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("listening on ")), "")
        if not line:
            raise SystemExit("the server did not start")
        try:
            yield f"http://127.0.0.1:{line.rsplit(':', 1)[1].strip()}"
        finally:
            process.send_signal(signal.SIGINT)


def scored(model: str, options: argparse.Namespace) -> Score:
    """All tasks of one file."""
    tasks = held_out(options.seed, options.limit, options.unseen_verbs) + needles(options.seed, options.needles)
    score = Score()
    if options.direct:
        return _scored_directly(model, options.engine, tasks)
    with served(model, options.slots, options.engine) as url, ThreadPoolExecutor(options.slots) as pool:
        done = [pool.submit(attempt, score, lambda api=Messages if i % 2 else Chat, task=task: api(url, task), task)
                for i, task in enumerate(tasks)]
        for waiting in done:
            waiting.result()
    return score


def _scored_directly(model: str, engine: str, tasks: list[Task]) -> Score:
    """One after the other: a model belongs to its thread."""
    import ds4mlx as ds
    from ds4mlx.config import Settings
    score = Score()
    with ds.load(model, Settings(engine=engine, ctx=CONTEXT)) as opened:
        for i, task in enumerate(tasks):
            attempt(score, lambda task=task: Direct(opened, task), task)
            if i % 50 == 49:
                told = {name: score.told(name) for name in NAMES}
                print(f"{model} after {i + 1}: {told}", file=sys.stderr, flush=True)
    return score


def perplexity(model: str, rows: int, seed: int) -> float:
    """Of the answers' tokens of held-out lessons."""
    import ds4mlx as ds
    session, total, count = ds.load(model).session(ROW), 0.0, 0
    for ids, weights in islice(lessons.rows(seed, ROW, 2, of_held=True), rows):
        session.rewind(0)
        session.read(ids.tolist())
        nll = -session.taps(layers=[]).logprobs[np.arange(ROW - 1), ids[1:]].astype(np.float64)
        answers = weights[1:] == ANSWER
        total, count = total + float(nll[answers].sum()), count + int(answers.sum())
    return math.exp(total / count)


def measured(model: str, options: argparse.Namespace) -> dict[str, str]:
    """Each line of the table for one file."""
    began, score = time.monotonic(), scored(model, options)
    if options.failures:
        print(*score.failures, sep="\n")
    told = {name: score.told(name) for name in NAMES if score.asked[name]}
    if options.rows:
        told |= {"perplexity": f"{perplexity(model, options.rows, options.seed):.4f}"}
    return told | {"seconds": f"{time.monotonic() - began:.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny"])
    for name, default in (("limit", 300), ("needles", 60), ("rows", 64), ("slots", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engine", default="mlx")
    parser.add_argument("--direct", action="store_true", help="in this process, without server and clients")
    parser.add_argument("--failures", action="store_true", help="show what was wanted and what came")
    parser.add_argument("--unseen-verbs", action="store_true", help="verbs in names are unseen as well")
    options = parser.parse_args()
    columns = {}
    for model in options.models:
        columns[model] = measured(model, options)
        print(f"{model}: {columns[model]}", file=sys.stderr, flush=True)
    print("| |" + "".join(f" {model} |" for model in columns) + "\n|---|" + "---|" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} |" + "".join(f" {column[name]} |" for column in columns.values()))


if __name__ == "__main__":
    main()
