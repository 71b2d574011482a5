"""Invented tools: a name, what it does, parameters with types, and the schema that shows all this to a model."""
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ds4mlx.chat.messages import Json
from ds4mlx.tiny.lessons.words import Words

KINDS = ("string",) * 9 + ("integer",) * 4 + ("number", "boolean", "boolean", "enum", "strings", "numbers", "object")
WITHOUT = 0.05    # share of tools without parameters
DESCRIPTIONS = ("{Action}.",) * 6 + ("{Action}", "{Acts}.", "{Acts}.", "Tool to {action}.", "Use this to {action}.")
SERVERS = ("mcp__{}__", "{}.", "{}_", "{}__")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str                        # one of KINDS
    required: bool
    value: Callable[[], Json]        # a value that may be asked for
    choices: tuple[str, ...] = ()    # of an enum
    description: str = ""

    @property
    def words(self) -> str:
        """The name as it is spoken: `max_results` is "max results"."""
        return spoken(self.name)

    def schema(self) -> dict[str, Json]:
        types: dict[str, dict[str, Json]] = {
            "enum": {"type": "string", "enum": list(self.choices)}, "object": {"type": "object"},
            "strings": {"type": "array", "items": {"type": "string"}},
            "numbers": {"type": "array", "items": {"type": "integer"}}}
        told: dict[str, Json] = {"description": self.description} if self.description else {}
        return types.get(self.kind, {"type": self.kind}) | told


@dataclass(frozen=True, slots=True)
class Tool:
    """`action` says what it does, in the words that a user says it in: "archive the invoice"."""
    name: str
    action: str
    parameters: tuple[Parameter, ...]
    strict: bool = False    # whether its schema has to be kept to
    closed: bool = False    # whether its schema forbids further properties
    asks: tuple[str, ...] = ()    # sentences of a well-known tool, {0} and so on being its parameters
    topic: str = ""         # no two tools of one: which is meant has to be clear
    description: str = ""

    @property
    def required(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.required)

    def schema(self) -> dict[str, Json]:
        parameters: dict[str, Json] = {
            "type": "object", "properties": {each.name: each.schema() for each in self.parameters},
            "required": [each.name for each in self.required]}
        if self.closed or self.strict:
            parameters["additionalProperties"] = False
        told: dict[str, Json] = {"name": self.name, "description": self.description}
        return told | ({"strict": True} if self.strict else {}) | {"parameters": parameters}


def spoken(name: str) -> str:
    """The words of a name: `max_results`, `maxResults` and `max-results` are "max results"."""
    parted = "".join(f" {c.lower()}" if c.isupper() and i else c for i, c in enumerate(name))
    return parted.replace("_", " ").replace("-", " ").replace(".", " ").lower()


def joined(rng: Random, parts: list[str]) -> str:
    """Words as one name, in a style of the field."""
    match rng.randrange(8):
        case 0:
            return parts[0] + "".join(part.capitalize() for part in parts[1:])
        case 1:
            return "-".join(parts)
        case _:
            return "_".join(parts)


def parameter(words: Words, name: str, kind: str, required: bool, described: bool = False) -> Parameter:
    """A parameter of that name and kind; its description, if any, repeats the name in words."""
    choices = tuple(dict.fromkeys(words.word() for _ in range(3))) if kind == "enum" else ()
    rng = words.rng
    makers: dict[str, Callable[[], Json]] = {
        "string": words.text, "integer": words.integer, "number": words.number,
        "boolean": lambda: rng.random() < 0.5, "enum": lambda: rng.choice(choices),
        "strings": lambda: [words.word() for _ in range(rng.randint(1, 4))],
        "numbers": lambda: [words.integer() for _ in range(rng.randint(1, 4))], "object": words.small_object}
    return Parameter(name, kind, required, makers[kind], choices, described_parameter(rng, name) if described else "")


def described_parameter(rng: Random, name: str) -> str:
    """What a schema says of a parameter: little more than its name."""
    words = spoken(name)
    return rng.choice(("The {}.", "The {}.", "The {} to use.", "{}", "The {} to use", "Name of the {}.")).format(words)


def described(rng: Random, action: str) -> str:
    """What a schema says that a tool does: "Run a command.", "Runs a command.", "Tool to run a command."."""
    verb, rest = action.split(" ", 1)
    third = verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else \
        verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")
    return rng.choice(DESCRIPTIONS).format(action=action, Action=f"{verb.capitalize()} {rest}",
                                           Acts=f"{third.capitalize()} {rest}")


def invented_parameters(words: Words, most: int) -> tuple[Parameter, ...]:
    rng, told = words.rng, words.rng.random() < 0.4
    names: dict[str, None] = {}
    for _ in range(rng.randint(1, most) if rng.random() > WITHOUT else 0):
        key = words.of("keys") if rng.random() < 0.5 else words.word()
        names[joined(rng, [key, words.word()]) if rng.random() < 0.25 else key] = None
    needed = rng.randint(min(1, len(names)), len(names))
    return tuple(parameter(words, name, rng.choice(KINDS), i < needed, told) for i, name in enumerate(names))


def invented(words: Words, most: int = 4, near: Tool | None = None) -> Tool:
    """A tool that nobody has: a verb, a thing, parameters of any kind. One `near` another invented one has its verb or
    its thing."""
    rng = words.rng
    verb, thing = _doing(words) if near is None else _doing_nearly(words, near)
    parts = [verb, *thing.split()]
    name = joined(rng, parts if rng.random() < 0.85 else parts[::-1])
    if rng.random() < 0.1:
        name = rng.choice(SERVERS).format(words.word()) + name
    action = f"{verb} {rng.choice(('the', 'the', 'a'))} {thing}"
    return Tool(name, action, invented_parameters(words, most), rng.random() < 0.1, rng.random() < 0.3,
                topic=parts[-1] if near is None else " ".join(parts), description=described(rng, action))


def _doing(words: Words) -> tuple[str, str]:
    """A verb and a thing, one in five with an adjective."""
    verb, thing = words.verb(), words.word()
    return verb, f"{words.of('adjectives')} {thing}" if words.rng.random() < 0.2 else thing


def _doing_nearly(words: Words, near: Tool) -> tuple[str, str]:
    verb, _, thing = near.action.split(" ", 2)
    match words.rng.choice("vvta"):
        case "v":
            return verb, _doing(words)[1]
        case "t":
            return words.verb(), thing
        case _:
            return verb, f"{words.of('adjectives')} {thing.split()[-1]}"
