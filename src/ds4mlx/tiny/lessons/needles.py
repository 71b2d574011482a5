"""Facts in long contexts, asked for thousands of tokens later; tools whose schemas are as far back."""
from collections.abc import Callable

from ds4mlx.tiny.lessons.episode import Ask, Episode, Reply, Results, Turn
from ds4mlx.tiny.lessons.prose import block, system
from ds4mlx.tiny.lessons.tooling import Size, called, toolbox
from ds4mlx.tiny.lessons.words import Words

FACTS = ("The {thing} of {name} is {value}.", "Remember: the {thing} of {name} is {value}.",
         "Note that the {thing} of {name} is {value}.")
ASKED = ("What is the {thing} of {name}?", "Tell me the {thing} of {name}.", "Do you remember the {thing} of {name}?",
         "What was the {thing} of {name}?")
THINGS = "code number password color key secret address name price size".split()


def needle(words: Words, tokens: int, facts: int = 4, questions: int = 3) -> list[Turn]:
    """Facts among about `tokens` tokens of other text, and questions for some of them at the end."""
    rng = words.rng
    known = [(rng.choice(THINGS), words.proper(), rng.choice((words.code, words.word, words.integer, words.text))())
             for _ in range(facts)]
    pieces = [block(words, max(1, tokens // (facts + 1))) for _ in range(facts + 1)]
    text = pieces[0]
    for (thing, name, value), piece in zip(known, pieces[1:]):
        text += "\n\n" + rng.choice(FACTS).format(thing=thing, name=name, value=value) + "\n\n" + piece
    turns: list[Turn] = []
    for i, (thing, name, value) in enumerate(rng.sample(known, min(questions, facts))):
        question = rng.choice(ASKED).format(thing=thing, name=name)
        turns += [Ask(question if i else f"{text}\n\n{question}"),
                  Reply(f"The {thing} of {name} is {value}.", reasoning=f"I look for {name}.")]
    return turns


def far_tools(words: Words, tokens: int, size: Size) -> Episode:
    """Tools first, then long results or long talk, then calls of those tools."""
    rng = words.rng
    tools = toolbox(words, size)
    turns: list[Turn] = []
    parts = rng.randint(1, 4)
    for _ in range(parts):
        turns += _long(words, tokens // parts, lambda: called(words, [rng.choice(tools)], told=False))
        turns += called(words, [rng.choice(tools)])
    return Episode(turns, system(words, rng.choice((0, 0, 8))), [tool.schema() for tool in tools])


def _long(words: Words, tokens: int, call: Callable[[], list[Turn]]) -> list[Turn]:
    """A call with a long result that nobody asks about, or a long text to note."""
    text = block(words, tokens)
    if words.rng.random() < 0.6:
        return [*call(), Results((text,)), Reply("That is a long result.", reasoning="It is long.")]
    return [Ask(f"Here is a text.\n\n{text}"), Reply("I have read it.", reasoning="I read.")]

