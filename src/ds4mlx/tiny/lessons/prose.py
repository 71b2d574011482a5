"""Text to fill a context with: instructions, notes, listings, logs. Regular, and about nothing that is asked for."""
from collections.abc import Callable
from functools import cache
from importlib import resources

from ds4mlx.tiny.lessons.words import Words

SYSTEMS = ("You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.", "Be brief and friendly.",
           "You are an assistant with tools. Use them.", "You help people with their work.",
           "Use tools where they fit.", "You are a coding agent. Work in small steps.", "Answer in one sentence.",
           "You are a careful assistant.",
           "Call a tool when the user asks for what it does.", "Today is a good day. Be kind.")
RULES = ("- {Verb} the {noun} before you {verb} the {noun}.", "- Never {verb} the {noun} of a {noun}.",
         "- The {noun} is {adjective}, the {noun} is {adjective}.", "- If the {noun} is {adjective}, {verb} it.",
         "- Always {verb} a {adjective} {noun} first.", "- {Proper} likes {adjective} {noun}s.")
SENTENCES = ("The {adjective} {noun} is in the {noun}.", "{Proper} has a {adjective} {noun}.",
             "In {Place} there is a {noun}.", "The {noun} of {Proper} is {adjective} and {adjective}.",
             "{Proper} went to {Place} with a {noun}.",
             "We {verb} the {noun} and then the {noun}.", "Nobody knows where the {noun} is.",
             "It was a {adjective} day in {Place}.", "The {noun} costs {number} and the {noun} costs {number}.",
             "{Proper} and {Proper} {verb} the {noun} together.", "A {noun} without a {noun} is {adjective}.")
LINES: tuple[str, ...] = (
    "{path} {number}", "{date} {time} {noun} {verb} {number}", "{time} info: {verb} {noun} ok", "{noun}: {text}",
    "def {noun}_{verb}({noun}): return {noun}", "{noun} = {number}", "{code} {text}", "# {adjective} {noun}")


CHARACTERS, CHARACTERS_OF_LINES = 2.5, 1.8   # of a token, measured


def filled(words: Words, frame: str) -> str:
    """A frame with words in its gaps."""
    first, *pieces = _parsed(frame)
    return first + "".join([GAPS[gap](words) + rest for gap, rest in pieces])


@cache
def _parsed(frame: str) -> tuple[str, *tuple[tuple[str, str], ...]]:
    """What stands before the first gap, then each gap and what stands behind it."""
    first, *pieces = frame.split("{")
    return (first, *((gap, rest) for gap, rest in (piece.split("}", 1) for piece in pieces)))


GAPS: dict[str, Callable[[Words], str]] = {
    "noun": Words.word, "verb": lambda words: words.of("verbs"), "Verb": lambda words: words.of("verbs").capitalize(),
    "adjective": lambda words: words.of("adjectives"), "Proper": Words.proper, "Place": Words.place,
    "number": lambda words: str(words.integer()), "path": Words.path, "date": Words.date, "time": Words.time,
    "text": Words.text, "code": Words.code}


@cache
def instructions() -> tuple[str, ...]:
    """What agents are told before their work."""
    return tuple((resources.files("ds4mlx.tiny.lessons") / "instructions.txt").read_text("utf-8").splitlines())


def system(words: Words, sentences: int = 0) -> str:
    """A system prompt; "" one time in four where nothing has to be filled."""
    rng = words.rng
    if not sentences and rng.random() < 0.25:
        return ""
    if rng.random() < 0.3:
        told = [rng.choice(instructions()) for _ in range(rng.randint(1, 6 + sentences))]
        return rng.choice(("\n", " ", "\n- ")).join(dict.fromkeys(told))
    opening = rng.choice(SYSTEMS) if rng.random() < 0.8 else f"You are {words.proper()}, who helps in {words.place()}."
    frames = RULES if rng.random() < 0.5 else SENTENCES
    link = "\n" if frames is RULES else " "
    return link.join([opening, *(filled(words, rng.choice(frames)) for _ in range(sentences))])


def block(words: Words, tokens: int) -> str:
    """About that many tokens of one kind: prose, a listing, or a log."""
    rng = words.rng
    frames = SENTENCES if rng.random() < 0.5 else (rng.choice(LINES),)
    link, parts, length = (" " if frames is SENTENCES else "\n"), [], 0
    while length < tokens * (CHARACTERS if frames is SENTENCES else CHARACTERS_OF_LINES):
        parts.append(filled(words, rng.choice(frames)))
        length += len(parts[-1]) + 1
    return link.join(parts)
