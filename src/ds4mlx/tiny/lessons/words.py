"""Words, names and values to make lessons of, in two parts that share none: to learn from, and to be asked about.

A word's digest decides its part, invented words included, so that no list has to be kept of what was learned.
"""
import hashlib
import json
from functools import cache
from importlib import resources
from random import Random

from ds4mlx.chat.messages import Json

HELD_SHARE = 0.2   # of all words, for scoring alone
FEW = {"keys": 10, "nouns": 40, "verbs": 12}    # words of each list in a lesson that has few
OF_FEW = 0.5       # share of such lessons
INVENTED_VERBS = 0.25
ONSETS = ("b b bl br c c ch cl cr d d dr f f fl fr g g gl gr h h j k k kl kr l l m m n n p p pl pr qu r r s s sh sk sl "
          "sn sp st str t t th tr v v w w y z").split()
VOWELS = "a a e e i o o u ai ea ee ie oa oo ou y".split()
CODAS = [*[""] * 12, *"b ck d f g l ll m n nd ng nk nt p r rd rk rn rt s sh sk st t th x z".split()]
ENDINGS = "py txt md json log csv toml rs c html sh yaml".split()
FOLDERS = "src lib docs tests data home etc var tmp build notes work".split()
ACCENTED = "äöüßéèêàáâçñíóúåøæłžščőęğ"
HEX = "0123456789abcdef"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def held(word: str) -> bool:
    """Whether a word is kept out of all lessons."""
    return hashlib.blake2b(word.lower().encode(), digest_size=2).digest() < _LIMIT


_LIMIT = int(HELD_SHARE * 65536).to_bytes(2, "big")


@cache
def listed(name: str, of_held: bool) -> tuple[str, ...]:
    """The words of one list of words.json, of one part."""
    return tuple(word for word in _lists()[name].split() if held(word) == of_held)


@cache
def pieces() -> tuple[str, ...]:
    """Pieces that the vocabulary breaks names into: words made of them teach each of its tokens to be copied."""
    return tuple(_lists()["pieces"].split())


@cache
def _lists() -> dict[str, str]:
    lists: dict[str, str] = json.loads((resources.files("ds4mlx.tiny.lessons") / "words.json").read_bytes())
    return lists


class Words:
    """A source of words and values of one part, as seeded. Verbs are the lessons' unless `held_verbs`.

    `varied` makes what is learned harder than what is asked in the end: words that several tools share, invented verbs.
    """

    def __init__(self, rng: Random, of_held: bool = False, held_verbs: bool = False, varied: bool = False) -> None:
        self.rng, self.of_held, self.held_verbs, self.varied = rng, of_held, held_verbs, varied
        self._few: dict[str, list[str]] = {}

    def begin(self) -> None:
        """Another lesson: where they are varied, in one of two each list is cut down to a few words."""
        self._few = {}
        if self.varied and self.rng.random() < OF_FEW:
            self._few = {name: self.rng.sample(self._list(name), min(count, len(self._list(name))))
                         for name, count in FEW.items()}

    def of(self, name: str) -> str:
        return self.rng.choice(self._few.get(name) or self._list(name))

    def _list(self, name: str) -> tuple[str, ...]:
        return listed(name, self.held_verbs if name == "verbs" else self.of_held)

    def verb(self) -> str:
        """Of a tool: one that people use or, where lessons are varied, one that nobody does."""
        return self.word() if self.varied and self.rng.random() < INVENTED_VERBS else self.of("verbs")

    def invented(self) -> str:
        """A word that no list has: `brindel`, `toask`."""
        rng = self.rng
        while True:
            word = "".join([rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
                            for _ in range(rng.choice((1, 2, 2, 2, 2, 3)))])
            if len(word) > 2 and held(word) == self.of_held:
                return word

    def pieced(self) -> str:
        """A word of the vocabulary's pieces, as hard to say as it may be: `chivebo`, `nelurd`."""
        while True:
            word = "".join(self.rng.choices(pieces(), k=self.rng.choice((2, 2, 2, 3))))
            if len(word) > 2 and held(word) == self.of_held:
                return word

    def accented(self) -> str:
        """A capitalised word with a letter that is no ASCII."""
        word = self.invented().capitalize()
        place = self.rng.randrange(1, len(word))
        return word[:place] + self.rng.choice(ACCENTED) + word[place:]

    def word(self) -> str:
        kind = self.rng.random()
        return self.invented() if kind < 0.35 else self.pieced() if kind < 0.6 else self.of("nouns")

    def proper(self) -> str:
        """A capitalised name of a person or place, listed or invented."""
        kind = self.rng.random()
        return (self.invented().capitalize() if kind < 0.3 else self.pieced().capitalize() if kind < 0.6 else
                self.of(self.rng.choice(("people", "places"))))

    def place(self) -> str:
        if self.rng.random() < 0.02:
            return self.accented()
        return self.of("places") if self.rng.random() < 0.5 else self.proper()

    def digits(self, count: int) -> str:
        return str(self.rng.randrange(10 ** (count - 1), 10 ** count))

    def code(self) -> str:
        """What identifies something: `KX-4821`, `3f9a02`, `b77-q`."""
        rng = self.rng
        match rng.randrange(4):
            case 0:
                return f"{''.join(rng.choices(CAPITALS, k=rng.randint(1, 3)))}-{self.digits(rng.randint(2, 4))}"
            case 1:
                return "".join(rng.choices(HEX, k=rng.randint(4, 8)))
            case 2:
                return f"{self.word()}-{self.digits(rng.randint(1, 3))}"
            case _:
                return "".join(rng.choices(CAPITALS, k=rng.randint(2, 5)))

    def path(self) -> str:
        rng = self.rng
        folders = [rng.choice(FOLDERS) if rng.random() < 0.5 else self.word() for _ in range(rng.randint(0, 2))]
        return rng.choice(("", "", "/", "./")) + "/".join([*folders, f"{self.word()}.{rng.choice(ENDINGS)}"])

    def phrase(self) -> str:
        return " ".join([self.word() for _ in range(self.rng.randint(2, 4))])

    def date(self) -> str:
        rng = self.rng
        return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    def time(self) -> str:
        return f"{self.rng.randrange(24):02}:{self.rng.randrange(60):02}"

    def email(self) -> str:
        return f"{self.word()}@{self.word()}.{self.rng.choice(('com', 'org', 'net'))}"

    def integer(self) -> int:
        return self.rng.randrange(10 ** self.rng.randint(1, 4))

    def number(self) -> int | float:
        return self.integer() if self.rng.random() < 0.6 else round(self.rng.uniform(0, 100), self.rng.randint(1, 2))

    def text(self) -> str:
        """A string of any kind."""
        return self.rng.choice((self.word, self.word, self.proper, self.code, self.path, self.phrase, self.date,
                                self.time, self.email))()

    def array(self) -> list[Json]:
        make = self.word if self.rng.random() < 0.6 else self.integer
        return [make() for _ in range(self.rng.randint(1, 4))]

    def small_object(self) -> dict[str, Json]:
        return {self.word(): self.rng.choice((self.word, self.integer))() for _ in range(self.rng.randint(1, 3))}
