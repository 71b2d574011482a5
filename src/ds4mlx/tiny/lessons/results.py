"""What a tool gives back, in the forms of the field, and what an assistant says of it."""
import json
from dataclasses import dataclass

from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Json
from ds4mlx.tiny.lessons.requests import listed
from ds4mlx.tiny.lessons.schemas import joined
from ds4mlx.tiny.lessons.words import Words

SKIES = "sunny cloudy rainy windy snowy foggy clear stormy".split()
FAILURES = ("Error: {}", "error: {}", '{{"error": "{}"}}', "ERROR: {}")
REASONS = ("{} not found", "no such {}", "the {} is missing", "{} is not allowed", "timeout after {n} seconds",
           "connection to {} refused", "permission denied: {}", "invalid {}", "the {} is busy", "unknown {}")


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool gave, the sentence that states it, and what has to be in any such sentence."""
    text: str
    spoken: str
    stated: tuple[str, ...]


def result(words: Words, topic: str = "") -> Result:
    """A result of any form; of a weather tool mostly weather."""
    rng = words.rng
    if topic == "weather" and rng.random() < 0.6:
        return _object(words, {"temperature": rng.randint(-20, 40), "sky": rng.choice(SKIES)})
    match rng.choice("ooooolllssaaee"):
        case "o":
            return _object(words, dict(_field(words) for _ in range(rng.randint(1, 4))))
        case "l":
            line = _line(words)
            return Result(line + rng.choice(("", "", "", "\n")), f"The result is: {line}", (line,))
        case "s":
            lines = [_line(words) for _ in range(rng.randint(2, 4))]
            text = "\n".join(lines)
            return Result(text + rng.choice(("", "", "", "\n")), f"The results are:\n{text}", tuple(lines))
        case "a":
            values: list[Json] = [rng.choice((words.word, words.path, words.integer))()
                                  for _ in range(rng.randint(2, 4))]
            told = [str(value) for value in values]
            return Result(spell(values), f"The results are {listed(told)}.", tuple(told))
        case _:
            return _failure(words)


def brief(words: Words, topic: str = "") -> Result:
    """A result of a word or a number."""
    line = words.word() if words.rng.random() < 0.6 else str(words.integer())
    return Result(line, f"The result is: {line}", (line,))


def _object(words: Words, fields: dict[str, Json]) -> Result:
    compact = words.rng.random() < 0.15
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":") if compact else (", ", ": "))
    spoken = listed([f"the {key} is {_said(value)}" for key, value in fields.items()])
    return Result(text, f"{spoken[0].upper()}{spoken[1:]}.", tuple(map(_said, fields.values())))


def _said(value: Json) -> str:
    return value if isinstance(value, str) else spell(value)


def _field(words: Words) -> tuple[str, Json]:
    rng = words.rng
    key = words.of("keys") if rng.random() < 0.6 else words.word()
    if rng.random() < 0.15:
        key = joined(rng, [key, words.word()])
    return key, rng.choice((words.text, words.text, words.number, words.integer, lambda: rng.random() < 0.5))()


def _line(words: Words) -> str:
    match words.rng.randrange(6):
        case 0:
            return f"{words.word()}: {words.text()}"
        case 1:
            return str(words.number())
        case 2:
            return f"{words.word()} {words.integer()}"
        case _:
            return words.text()


def _failure(words: Words) -> Result:
    thing = words.rng.choice((words.word, words.path, words.code))()
    reason = words.rng.choice(REASONS).format(thing, n=words.rng.randint(1, 99))
    return Result(words.rng.choice(FAILURES).format(reason), f"The call failed: {reason}.", (reason,))
