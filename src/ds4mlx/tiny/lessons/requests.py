"""What a user says so that one tool has to be called with certain arguments."""
import string
from random import Random

from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Json
from ds4mlx.tiny.lessons.episode import Call
from ds4mlx.tiny.lessons.schemas import Parameter, Tool

SHOWN = ("Call {name} with {all}.", "Use {name} with {all}.", "Please call {name}: {all}.", "{name}: {all}",
         "Use the tool {name} with {all}.", "I want you to call {name} with {all}.")
WORDED = ("{Action} with {all}.", "Please {action} with {all}.", "{Action}, {all}.", "Can you {action} with {all}?",
          "I want to {action} with {all}.", "{Action}: {all}.")
SINGLE = ("{Action} {all}.", "Please {action} {all}.", "Can you {action} {all}?", "I want to {action} {all}.")
ALONE = ("{Action}.", "Please {action}.", "Call {name}.", "Use {name}.", "Can you {action}?", "I want to {action}.")
NAMED = 0.35    # share of requests that name the tool and its parameters as they are
POLITE = ("{}",) * 6 + ("Please help me. {}", "Hello! {}", "Now this: {}", "{} Thanks.")


def request(rng: Random, tool: Tool, named: float = NAMED) -> tuple[str, Call]:
    """A sentence that asks for one call of the tool, and that call. Arguments come in the order of the sentence."""
    text, call = _known(rng, tool) if tool.asks else _invented(rng, tool, named)
    return rng.choice(POLITE).replace("{}", text), call


def shown(rng: Random, value: Json) -> str:
    """A value as a sentence has it: JSON, but for strings, which go without quotes where they are one word."""
    if isinstance(value, str):
        if " " not in value and rng.random() < 0.6:
            return value
        return rng.choice('"""\'`').join(("", value, ""))
    if isinstance(value, list) and len(value) > 1 and rng.random() < 0.2:
        return f"{', '.join(map(str, value[:-1]))} and {value[-1]}"
    return spell(value)


def _known(rng: Random, tool: Tool) -> tuple[str, Call]:
    needed = {place for place, each in enumerate(tool.parameters) if each.required}
    ask = rng.choice([ask for ask in tool.asks if needed <= set(_places(ask))])
    values = {place: tool.parameters[place].value() for place in _places(ask)}
    text = ask.format(*(shown(rng, values[place]) if place in values else "" for place in range(len(tool.parameters))))
    return text, Call(tool.name, {tool.parameters[place].name: value for place, value in values.items()})


def _places(ask: str) -> list[int]:
    return [int(field) for _, field, _, _ in string.Formatter().parse(ask) if field]


def _invented(rng: Random, tool: Tool, named: float) -> tuple[str, Call]:
    extra = [each for each in tool.parameters if not each.required and rng.random() < 0.4]
    chosen = [*tool.required, *extra]
    if rng.random() < 0.15:
        rng.shuffle(chosen)
    arguments = {each.name: each.value() for each in chosen}
    if not chosen:
        frame, told = rng.choice(ALONE), ""
    elif len(chosen) == 1 and rng.random() < 0.5:
        frame, told = rng.choice(SINGLE), shown(rng, arguments[chosen[0].name])
    else:
        frame = rng.choice(SHOWN if rng.random() < named else WORDED)
        told = listed([_pair(rng, each, shown(rng, arguments[each.name]), "{name}" in frame) for each in chosen])
    text = frame.format(name=tool.name, action=tool.action, Action=tool.action[0].upper() + tool.action[1:], all=told)
    return text, Call(tool.name, arguments)


def _pair(rng: Random, parameter: Parameter, value: str, exact: bool) -> str:
    if exact or rng.random() < 0.3:
        return f"{parameter.name}{rng.choice((' ', ' = ', '=', ': '))}{value}"
    return f"{parameter.words} {value}"


def listed(parts: list[str]) -> str:
    """a; a and b; a, b and c"""
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
