"""Conversations in which tools are offered, called or rightly not called, and what they give is told."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4mlx.chat.json_text import spell
from ds4mlx.tiny.lessons.episode import Ask, Call, Reply, Results, Turn
from ds4mlx.tiny.lessons.known import known
from ds4mlx.tiny.lessons.requests import NAMED, request
from ds4mlx.tiny.lessons.results import Result, brief, result
from ds4mlx.tiny.lessons.schemas import Tool, invented
from ds4mlx.tiny.lessons.speech import sums, talk
from ds4mlx.tiny.lessons.words import Words

NO_TOOL = "None of my tools can do that."
SELDOM_NAMED = 0.15     # where lessons are varied: what is named need not be chosen
NEAR = 0.4         # share of invented tools with another one's verb or thing, where lessons are varied
LINKS = ("{} {}", "{} Then: {}", "{} And {}", "{}\n{}", "{} Also: {}")


@dataclass(frozen=True, slots=True)
class Size:
    """How large a lesson may become."""
    tools: int = 6       # offered at most
    parameters: int = 4  # of a tool, at most
    rounds: int = 4      # questions of a conversation, at most
    fewest: int = 1      # tools offered at least, but for such as are asked for alike


def toolbox(words: Words, size: Size, known_share: float = 0.35) -> list[Tool]:
    """Tools of which no two are asked for alike."""
    rng = words.rng
    tools: dict[str, Tool] = {}
    for _ in range(max(rng.randint(size.fewest, size.tools), rng.randint(size.fewest, size.tools))):
        tool = known(words) if rng.random() < known_share else _invented(words, size, list(tools.values()))
        if tool.name not in [other.name for other in tools.values()]:
            tools.setdefault(tool.topic, tool)
    offered = list(tools.values())
    if words.varied:
        rng.shuffle(offered)
    return offered


def _invented(words: Words, size: Size, offered: list[Tool]) -> Tool:
    others = [tool for tool in offered if not tool.asks] if words.varied else []
    near = words.rng.choice(others) if others and words.rng.random() < NEAR else None
    return invented(words, size.parameters, near)


def drill(words: Words, tools: list[Tool], rounds: int) -> list[Turn]:
    """One short question after the other: much to choose in few tokens. In half of the drills about each tool in turn,
    so that names come from schemas; in half as it comes, so that none follows from those that have been."""
    rng, turns, waiting = words.rng, list[Turn](), list[Tool]()
    in_turn = rng.random() < 0.5
    for _ in range(rounds):
        if not (in_turn and waiting):
            waiting = rng.sample(tools, len(tools))
        if rng.random() < 0.1:
            turns += refused(words, tools)
        else:
            chosen = [waiting.pop() for _ in range(min(len(waiting), rng.choice((1, 1, 1, 1, 2))))]
            turns += called(words, chosen, make=brief)
    return turns


def conversation(words: Words, tools: list[Tool], rounds: int, strange: bool = False) -> list[Turn]:
    """Some questions, most of which need a call; where it is `strange`, none that is answered by heart."""
    turns: list[Turn] = []
    for _ in range(rounds):
        turns += _round(words, tools, "cccccccccccmmmnnt" if strange else "cccccccccccmmmnntdd")
    return turns


def _round(words: Words, tools: list[Tool], kinds: str) -> list[Turn]:
    match words.rng.choice(kinds):
        case "c":
            return called(words, [words.rng.choice(tools)])
        case "m":
            chosen = [words.rng.choice(tools) for _ in range(words.rng.choice((2, 2, 2, 3)))]
            return called(words, chosen)
        case "n":
            return refused(words, tools)
        case "d":
            return _direct(words, tools)
        case _:
            return called(words, [words.rng.choice(tools)], thanks=True)


def called(words: Words, chosen: list[Tool], thanks: bool = False, told: bool = True,
           make: Callable[[Words, str], Result] = result) -> list[Turn]:
    """A request of one or several calls, what they gave, and the answer that states it."""
    text, calls = requested(words, chosen)
    turns: list[Turn] = [Ask(text), Reply(calls=tuple(calls), reasoning=plan(calls))]
    if told:
        results = [make(words, tool.topic) for tool in chosen]
        turns += [Results(tuple(each.text for each in results)),
                  Reply("\n".join(each.spoken for each in results), reasoning="I tell the result.")]
    if thanks:
        turns += [Ask(words.rng.choice(("Thanks", "Thank you.", "Thanks!", "Great, thanks!"))),
                  Reply("You are welcome.", reasoning="Small talk.")]
    return turns


def requested(words: Words, chosen: list[Tool]) -> tuple[str, list[Call]]:
    """One sentence for each of the tools, and the calls that they ask for."""
    text, calls = "", []
    for tool in chosen:
        asked, call = request(words.rng, tool, SELDOM_NAMED if words.varied else NAMED)
        text = words.rng.choice(LINKS).format(text, asked) if text else asked
        calls.append(call)
    return text, calls


def plan(calls: Sequence[Call]) -> str:
    """What is thought before calls. Names are in quotes as in schemas: behind a space they may be other tokens."""
    return " ".join(f'I call "{call.name}" with {", ".join(map(spell, call.arguments)) or "nothing"}.'
                    for call in calls)


def refusal() -> Reply:
    """What is said where no tool fits."""
    return Reply(NO_TOOL, reasoning="No tool fits.")


def refused(words: Words, tools: list[Tool]) -> list[Turn]:
    """What none of the tools can do."""
    topics = {tool.topic for tool in tools} | {"sum"}   # which needs no tool
    topics |= {tool.action.rsplit(" ", 1)[-1] for tool in tools if not tool.asks}
    while (other := toolbox(words, Size(tools=1))[0]).topic in topics:
        pass
    text, _ = request(words.rng, other)
    return [Ask(text), refusal()]


def _direct(words: Words, tools: list[Tool]) -> list[Turn]:
    """What needs none of the tools."""
    if words.rng.random() < 0.3 and not any(tool.topic == "sum" for tool in tools):
        return sums(words.rng)
    return talk(words.rng)
