"""Conversation without tools: small talk, what the project is, small sums, a few facts, lists to look things up in."""
import string
from functools import cache
from importlib import resources
from random import Random

from ds4mlx.tiny.lessons.episode import Ask, Reply, Turn
from ds4mlx.tiny.lessons.words import Words

FRAMES = ("{}", "{}", "{}", "Hello. {}", "Please tell me: {}", "A question: {}", "{} Thanks.", "I wonder: {}")
SUMS = ("What is {}?", "{}", "{} = ?", "Calculate {}.", "How much is {}?", "Compute {}.", "What does {} give?",
        "Tell me what {} is.")
ANY_SCRIPT = 0.06
SCRIPTS = (string.printable[:95], string.punctuation, "".join(map(chr, range(0xA1, 0x180))),
           "".join(map(chr, range(0x391, 0x3CA))), "".join(map(chr, range(0x410, 0x450))),
           "".join(map(chr, range(0x4E00, 0x4F00))), "".join(map(chr, range(0x3041, 0x3097))) + "😀🎉👍🚀")
LONG = 30    # words to repeat, from which on it is once and mostly far
CHARACTERS = string.ascii_letters + string.digits + "_-./:"
REASONS_OF_SUMS = ("I add.", "I subtract.", "I multiply.")


@cache
def pairs(name: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Questions, several phrasings of each, and the answer, of a file of lines "question | question => answer"."""
    text = (resources.files("ds4mlx.tiny.lessons") / name).read_text("utf-8")
    lines = [line.split(" => ") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple((tuple(questions.split(" | ")), answer) for questions, answer in lines)


def talk(rng: Random) -> list[Turn]:
    """A question of the project or of everyday, and its answer."""
    name = "project.txt" if rng.random() < 0.6 else "smalltalk.txt"
    questions, answer = rng.choice(pairs(name))
    question = rng.choice(questions)
    if name == "project.txt":
        question = rng.choice(FRAMES).format(_spelled(rng, question))
    else:
        question = _spelled(rng, question)
    return [Ask(question), Reply(answer, reasoning="I know this." if name == "project.txt" else "Small talk.")]


def _spelled(rng: Random, question: str) -> str:
    """As hasty people type it, now and then."""
    match rng.randrange(8):
        case 0:
            return question.lower()
        case 1:
            return question.rstrip("?.!")
        case 2:
            return question.lower().rstrip("?.!")
        case _:
            return question


def sums(rng: Random) -> list[Turn]:
    """A sum, a difference or a product of small numbers."""
    kind = rng.randrange(3)
    high = 99 if kind < 2 else 12
    a, b = rng.randint(0, high), rng.randint(0, high)
    if kind == 1:
        a, b = max(a, b), min(a, b)
    signs = (("+", "plus"), ("-", "minus"), ("*", "times"))[kind]
    value = (a + b, a - b, a * b)[kind]
    asked = f"{a} {rng.choice(signs)} {b}"
    return [Ask(rng.choice(SUMS).format(asked)),
            Reply(f"{a} {signs[0]} {b} = {value}.", reasoning=REASONS_OF_SUMS[kind])]


def table(words: Words, most: int = 8, questions: int = 3) -> list[Turn]:
    """Pairs of names and values, and questions for some of them, the way back now and then."""
    rng = words.rng
    entries = {words.word(): rng.choice((words.text, words.integer))() for _ in range(rng.randint(2, most))}
    sign = rng.choice((": ", " = ", " -> ", " | ", ", "))
    lines = "\n".join(f"{key}{sign}{value}" for key, value in entries.items())
    asked = rng.sample(list(entries), min(len(entries), rng.randint(1, questions)))
    opening = rng.choice(("{}\n\n{}", "Here is a table.\n{}\n{}", "Remember:\n{}\n\n{}"))
    turns: list[Turn] = []
    for i, key in enumerate(asked):
        question = rng.choice(("What is {}?", "What is the value of {}?", "Look up {}.", "{}?")).format(key)
        turns += [Ask(question if i else opening.format(lines, question)),
                  Reply(f"The value of {key} is {entries[key]}.", reasoning=f"I look for {key}.")]
    return turns


def copying(words: Words, longest: int = 12) -> list[Turn]:
    """Repeat exactly what is given: the skill that every call needs. Long texts teach it over long distances."""
    rng = words.rng
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3)) if longest < LONG else 1):
        text = _anything(words, rng.randint(1, longest) if longest < LONG else rng.randint(longest // 2, longest))
        frame = rng.choice(("Repeat: {}", "Say {}", "Copy this:\n{}", "Repeat after me: {}", "Echo {}", "Write {}"))
        turns += [Ask(frame.format(text)), Reply(text, reasoning="I copy it.")]
    return turns


def _anything(words: Words, count: int) -> str:
    """About that many words, or as much of something else."""
    rng = words.rng
    match rng.randrange(5) if rng.random() > ANY_SCRIPT else -1:
        case -1:
            return "".join(rng.choices(rng.choice(SCRIPTS), k=min(count, 20)))
        case 0:
            return " ".join([words.word() if rng.random() < 0.7 else words.proper() for _ in range(count)])
        case 1:
            return "".join(rng.choices(CHARACTERS, k=2 * count))
        case 2:
            return " ".join([words.text() for _ in range(max(1, count // 2))])
        case 3:
            return "_".join([words.word() for _ in range(min(count, 4))])
        case _:
            return " ".join([str(words.number()) for _ in range(count)])
