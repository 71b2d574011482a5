"""Which lesson comes next: by stage, and by the room that is left in a row."""
from random import Random

from ds4mlx.tiny.lessons.episode import Episode, Turn
from ds4mlx.tiny.lessons.needles import far_tools, needle
from ds4mlx.tiny.lessons.prose import block, system
from ds4mlx.tiny.lessons.speech import copying, sums, table, talk
from ds4mlx.tiny.lessons.tooling import Size, conversation, drill, toolbox
from ds4mlx.tiny.lessons.words import Words

STAGES = (1, 2, 3)
SHARES = {1: (35, 25, 30, 6, 4), 2: (4, 4, 84, 6, 2), 3: (4, 4, 84, 6, 2)}     # of copy, table, tools, talk, sums
FILLING = (40, 30, 0, 20, 10)   # of the same where tools have no room: with the instructions around them they need
LEAST_TOOLS = 450               # tokens, and more if they are to be worth a choice
MANY = 4       # tools, whose schemas leave room for few questions in a short row
STRANGE = 0.4  # share of lessons that may be
FAR = 1500    # tokens of room from which on a lesson may be a long one
DRILLED = 0.85  # share of tool lessons with that room that are questions about every tool
FAR_ROUNDS = 6      # questions in a row about tools thousands of tokens back
SCHEMAS, ROUND, MOST_ROUNDS = 700, 145, 12      # tokens, roughly, of six tools and of a question; questions


def episode(words: Words, stage: int, room: int) -> Episode:
    """A lesson of that stage, mostly of no more than `room` tokens. Long ones fill the room."""
    rng = words.rng
    words.begin()
    if stage == 3 and room > FAR and rng.random() < 0.75:
        return _far(words, int(room * rng.uniform(0.35, 0.9)))
    shares = SHARES[stage] if stage == 1 or room > LEAST_TOOLS else FILLING
    lesson = rng.choices(("copy", "table", "tools", "talk", "sums"), shares)[0]
    if lesson == "tools":
        made = _tools(words, stage, room, rng.random() < STRANGE)
    else:
        made = Episode(_talk(words, lesson, room), _opening(words),
                       strange=lesson in ("copy", "table") and rng.random() < STRANGE)
    return _minded(rng, made, stage)


def _minded(rng: Random, made: Episode, stage: int) -> Episode:
    """In one of two lessons the model thinks, now and then with more effort than it needs."""
    made.thinking = rng.random() < 0.5
    if made.thinking and stage > 1 and rng.random() < 0.05:
        made.effort = rng.choice(("high", "max"))
    return made


def _opening(words: Words) -> str:
    return system(words) if words.rng.random() < 0.3 else ""


def _talk(words: Words, lesson: str, room: int) -> list[Turn]:
    rng = words.rng
    match lesson:
        case "copy":
            return copying(words, max(1, min(rng.choice((4, 12, 40, 120)), room // 10)))
        case "table":
            return table(words, max(2, min(rng.choice((4, 8, 30)), room // 24)), 6)
        case "sums":
            return [turn for _ in range(rng.randint(1, 3)) for turn in sums(rng)]
        case _:
            return [turn for _ in range(rng.randint(1, 3)) for turn in talk(rng)]


def _tools(words: Words, stage: int, room: int, strange: bool) -> Episode:
    """Bare at first: without the instructions around the schemas, few tools, one question."""
    rng = words.rng
    if stage > 1 and room > FAR and rng.random() < DRILLED:
        return _drill(words, room, strange)
    bare = stage == 1 and (room < 640 or rng.random() < 0.7)
    size = Size(2, 2, 1) if room < 400 else Size(2, 2, 2) if bare else Size(3, 3, 2) if room < 800 else Size()
    tools = toolbox(words, size)
    rounds = rng.randint(1, size.rounds if len(tools) < MANY or room > FAR else 2)
    turns = conversation(words, tools, rounds, strange)
    head = system(words, 0 if bare or rng.random() < 0.8 else rng.randint(1, 12))
    return Episode(turns, head, [tool.schema() for tool in tools], bare=bare, strange=strange)


def _drill(words: Words, room: int, strange: bool) -> Episode:
    rng = words.rng
    tools = toolbox(words, Size(fewest=4), known_share=0.5)
    most = min(MOST_ROUNDS, (room - SCHEMAS) // ROUND)
    return Episode(drill(words, tools, rng.randint(2 * most // 3, most)), system(words),
                   [tool.schema() for tool in tools], bare=rng.random() < 0.25, strange=strange)


def _far(words: Words, tokens: int) -> Episode:
    rng = words.rng
    match rng.randrange(8):
        case 0 | 1 | 2:
            made = Episode(needle(words, tokens, rng.randint(3, 8), rng.randint(2, 6)), _opening(words))
        case 3:
            tools = toolbox(words, Size(3))
            made = Episode(needle(words, tokens), system(words), [tool.schema() for tool in tools])
        case 4:
            made = Episode(drill(words, tools := toolbox(words, Size(fewest=4)), FAR_ROUNDS),
                           system(words) + "\n" + block(words, tokens), [tool.schema() for tool in tools])
        case _:
            made = far_tools(words, tokens, Size(fewest=4), FAR_ROUNDS)
    made.strange = rng.random() < STRANGE
    return _minded(rng, made, 3)

