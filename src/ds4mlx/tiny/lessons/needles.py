"""Facts in long contexts, asked for thousands of tokens later; tools whose schemas are as far back."""
from collections.abc import Callable

from ds4mlx.chat.messages import Json
from ds4mlx.tiny.lessons.episode import Ask, Episode, Reply, Results, Turn
from ds4mlx.tiny.lessons.prose import block, system
from ds4mlx.tiny.lessons.tooling import Size, called, drill, toolbox
from ds4mlx.tiny.lessons.words import Words

FACTS = ("{Subject} is {value}.", "Remember: {subject} is {value}.", "Note that {subject} is {value}.",
         "Note: {subject} is {value}.")
ASKED = ("What is {subject}?", "Tell me {subject}.", "Do you remember {subject}?", "What was {subject}?")
THINGS = "code number password color key secret address name price size word".split()
NAMELESS = 0.2    # share of subjects like "the secret word", which belong to nobody


def subject(words: Words) -> str:
    """What a fact is about: "the code of Kalmor", "the secret word"."""
    thing = words.rng.choice(THINGS)
    if words.rng.random() < NAMELESS:
        kind = words.rng.choice(("secret", words.of("adjectives"), words.word()))
        return f"the {kind} {thing}"
    return f"the {thing} of {words.proper()}"


def stated(subject: str, value: Json) -> str:
    """The fact as an answer."""
    return f"{subject[0].upper()}{subject[1:]} is {value}."


def needle(words: Words, tokens: int, facts: int = 4, questions: int = 3) -> list[Turn]:
    """Facts among about `tokens` tokens of other text, and questions for some of them at the end."""
    rng = words.rng
    known: dict[str, Json] = {subject(words): rng.choice((words.code, words.word, words.integer, words.text))()
                              for _ in range(facts)}
    text = block(words, max(1, tokens // (facts + 1)))
    for about, value in known.items():
        text += f"\n\n{fact(words, about, value)}\n\n{block(words, max(1, tokens // (facts + 1)))}"
    turns: list[Turn] = []
    for i, about in enumerate(rng.sample(list(known), min(questions, len(known)))):
        question = rng.choice(ASKED).format(subject=about)
        turns += [Ask(question if i else f"{text}\n\n{question}"),
                  Reply(stated(about, known[about]), reasoning=f"I look for {about}.")]
    return turns


def fact(words: Words, about: str, value: Json) -> str:
    """A sentence to be remembered."""
    return words.rng.choice(FACTS).format(Subject=about[0].upper() + about[1:], subject=about, value=value)


def far_tools(words: Words, tokens: int, size: Size, rounds: int) -> Episode:
    """Tools first, then long results or long talk, then calls of those tools, and short questions about them."""
    rng = words.rng
    tools = toolbox(words, size)
    turns: list[Turn] = []
    parts = rng.randint(1, 4)
    for _ in range(parts):
        turns += _long(words, tokens // parts, lambda: called(words, [rng.choice(tools)], told=False))
        turns += called(words, [rng.choice(tools)])
    turns += drill(words, tools, rounds)
    return Episode(turns, system(words, rng.choice((0, 0, 8))), [tool.schema() for tool in tools])


def _long(words: Words, tokens: int, call: Callable[[], list[Turn]]) -> list[Turn]:
    """A call with a long result that nobody asks about, or a long text to note."""
    text = block(words, tokens)
    if words.rng.random() < 0.6:
        return [*call(), Results((text,)), Reply("That is a long result.", reasoning="It is long.")]
    return [Ask(f"Here is a text.\n\n{text}"), Reply("I have read it.", reasoning="I read.")]

