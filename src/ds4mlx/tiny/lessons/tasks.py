"""Tasks to score the model by: tools, names and values that no lesson has, and facts far back in a long text."""
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from ds4mlx.chat.messages import Json
from ds4mlx.tiny.lessons.episode import Ask, Call, Episode, Reply
from ds4mlx.tiny.lessons.needles import ASKED, fact, subject
from ds4mlx.tiny.lessons.prose import block, system
from ds4mlx.tiny.lessons.results import result
from ds4mlx.tiny.lessons.tooling import Size, plan, refusal, refused, requested, toolbox
from ds4mlx.tiny.lessons.words import Words

NEAREST, FARTHEST = 2000, 8000   # tokens that a needle lies back
SEVERAL, NONE = 0.1, 0.1         # shares of tasks that need two calls, and none


@dataclass(frozen=True, slots=True)
class Task:
    """A question, the calls that answer it, what they give, and what the last answer has to hold."""
    question: str
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()
    tools: tuple[dict[str, Json], ...] = ()
    system: str = ""
    thinking: bool = False
    back: int = 0    # tokens, about, that a needle lies back; 0 for a task with tools

    def solved(self) -> Episode:
        """A task with tools as a lesson would have it, up to its calls."""
        answer = Reply(calls=self.calls, reasoning=plan(self.calls)) if self.calls else refusal()
        return Episode([Ask(self.question), answer], self.system, self.tools, self.thinking)


def held_out(seed: int, count: int, unseen_verbs: bool = False) -> list[Task]:
    """Tasks with tools. Of ten, one needs two calls and one needs none. No tool's and no parameter's name is in a
    lesson; the verbs in names (get, list, delete) are, unless they are to be unseen as well."""
    words = Words(Random(f"{seed} tasks"), of_held=True, held_verbs=unseen_verbs)
    return [_tool_task(words) for _ in range(count)]


def endless(seed: int) -> Iterator[Task]:
    """More of what `held_out` begins with."""
    words = Words(Random(f"{seed} tasks"), of_held=True)
    while True:
        yield _tool_task(words)


def needles(seed: int, count: int) -> list[Task]:
    """Tasks whose answer lies NEAREST to FARTHEST tokens back."""
    words = Words(Random(f"{seed} needles"), of_held=True)
    return [_needle_task(words, NEAREST + (FARTHEST - NEAREST) * i // max(count - 1, 1)) for i in range(count)]


def _tool_task(words: Words) -> Task:
    rng = words.rng
    tools = toolbox(words, Size())
    schemas = tuple(tool.schema() for tool in tools)
    head, thinking = system(words), rng.random() < 0.5
    if rng.random() < NONE:
        asked = refused(words, tools)[0]
        assert isinstance(asked, Ask)
        return Task(asked.text, tools=schemas, system=head, thinking=thinking)
    chosen = [rng.choice(tools) for _ in range(2 if rng.random() < SEVERAL else 1)]
    text, calls = requested(words, chosen)
    results = [result(words, tool.topic) for tool in chosen]
    stated = tuple(value for each in results for value in each.stated)
    return Task(text, tuple(calls), tuple(each.text for each in results), stated, schemas, head, thinking)


def _needle_task(words: Words, back: int) -> Task:
    rng = words.rng
    about = subject(words)
    value = str(rng.choice((words.code, words.word, words.integer))())
    question = rng.choice(ASKED).format(subject=about)
    before, after = block(words, rng.randrange(100, 800)), block(words, back)
    text = f"{before}\n\n{fact(words, about, value)}\n\n{after}\n\n{question}"
    return Task(text, stated=(value,), thinking=rng.random() < 0.5, back=back)
